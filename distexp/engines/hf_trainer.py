"""The Hugging Face Trainer as a trainer of distexp, with distexp's model, data and optimizer."""

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.runs.record_sections import Built
from distexp.strategies.base import EvaluableModel, load_strategy
from distexp.training.inputs import ModelFactory, TrainingInputs

# Imported once for all workers of a node. Not transformers.trainer: it imports datasets, which copies HF_HUB_OFFLINE.
PRELOAD = ("accelerate",)


class HFTrainer:
    """A trainer that runs ``transformers.Trainer``; accelerate distributes the model."""

    def validate(self, config: Config) -> list[str]:
        """Refuse settings that transformers.Trainer would ignore or change."""
        strategy = load_strategy(config)
        if strategy.own_hf_adapter() is None:
            return [f"engine=hf_trainer does not support strategy={config.strategy.name}: choose engine=native"]
        for key in ("checkpoint_every", "resume"):
            if (value := getattr(config.train, key)) is not None:
                refused = f"train.{key}={value} is not supported by engine=hf_trainer"
                return [f"{refused}: leave it out, or choose engine=native"]
        return strategy.hf_errors(config)

    def train(
        self, build_model: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Run ``transformers.Trainer.train`` until the end of the plan."""
        from distexp.engines.hf_loop import DistexpTrainer, HFEvaluableModel, TrainingCallback
        from distexp.strategies.torch_model import explained_model_errors

        trainer = DistexpTrainer(build_model(), config, context, inputs)
        model = HFEvaluableModel(trainer)
        callback = TrainingCallback(trainer, model)
        trainer.add_callback(callback)
        with explained_model_errors(trainer.model, config):
            trainer.train()
        assert callback.built is not None, "on_train_begin sets it"
        return model, callback.built
