"""Tests of the command line as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from distexp import __version__
from distexp.cli.arguments import normalize_arguments
from distexp.cli.errors import explain
from distexp.cli.main import COMMANDS, main
from distexp.config import Command, ConfigError
from distexp.config.overrides import check_cell_count, parse
from distexp.help import main as help_main
from distexp.runs.record import RunRecord
from tests.helpers.records import record, write
from tests.helpers.runs import REPOSITORY, resolve_cell, run_distexp, run_module, start_distexp

WRONG_WORDS = {  # command lines that are refused before Hydra starts, with a part of their message
    "epochs=3": "distexp: epochs is not a key: write train.num_epochs=3\n",
    "lr=0.1": "distexp: lr is not a key: write train.learning_rate=0.1\n",
    "--multirun lr=0.1,0.2": "lr is not a key: write train.learning_rate=0.1,0.2\n",
    "batch_size=8": "batch_size is not a key: write train.micro_batch_size=8\n",
    "gpus=2 nodes=2": "gpus is not a key: write cluster.workers_per_node=2\ndistexp: nodes is not a key: write clust",
    "workers=2": "workers is not a key: write cluster.workers_per_node=2\n",
    "steps=10": "steps is not a key: write train.max_steps=10\n",
    "max_steps=10": "max_steps is not a key: write train.max_steps=10\n",
    "--gpus 2": "--gpus is not an option: write cluster.workers_per_node=2\n",
    "slurm.partition=gpu": "distexp: slurm.partition is not a key: write cluster.partition=gpu\n",
    "training.lr=0.1": "distexp: training.lr is not a key: write train.learning_rate=0.1\n",
    "train.micro_batch_size=[": "train.micro_batch_size=[",
    "strategy": "neither a command nor KEY=VALUE: write strategy=OPTION, with one of ddp, deepspeed, fsdp, single\n",
    "deepspeed/zero_stages": "neither a command nor KEY=VALUE: write experiment=deepspeed/zero_stages\n",
    "foo": "distexp: foo is neither a command nor KEY=VALUE: see distexp --help\n",
    "statsu DIR": "distexp: statsu is neither a command nor KEY=VALUE. Did you mean status?\n",
    "multirun strategy=ddp": "distexp: multirun is neither a command nor KEY=VALUE: write --multirun\n",
    "strategy=ddp plan -m": "plan is a command, which must come first: type distexp plan strategy=ddp -m\n",
    "--config-dir plan strategy=ddp plan": "first: type distexp plan --config-dir plan strategy=ddp\n",
    "strategy=ddp plan --config-dir plan": "first: type distexp plan strategy=ddp --config-dir plan\n",
    "--config-dir=/tmp plan": "first: type distexp plan --config-dir=/tmp\n",
    "preflight measure.enabled=true preflight": "first: type distexp preflight measure.enabled=true\n",
    "strategy=ddp foo": "foo is not KEY=VALUE: write for example strategy=fsdp",
    "--strategy fsdp": "distexp: --strategy is not an option: write strategy=fsdp\n",
    "--strategy=fsdp --multirun": "distexp: --strategy is not an option: write strategy=fsdp\n",
    "strategy=ddp --learning-rate 0.1": "--learning-rate is not an option: write train.learning_rate=0.1",
    "--offload": "--offload is not an option: write offload=VALUE",
    "--experimental-rerun run.pickle": "--experimental-rerun is not supported: use distexp resume DIR",
    "--nonsense": "--nonsense is not an option: see distexp --help",
    "strategy fsdp": "distexp: unexpected space in 'strategy fsdp': write strategy=fsdp\n",
    "strategy= fsdp": "distexp: unexpected space in 'strategy= fsdp': write strategy=fsdp\n",
    "strategy = fsdp zero_stage=1": "unexpected space in 'strategy = fsdp': write strategy=fsdp\n",
    "--multirun zero_stage=1, 2": "unexpected space in 'zero_stage=1, 2': write zero_stage=1,2\n",
    "strategy=ddp --multirun offload=true, false": "unexpected space in 'offload=true, false': write offload=true,",
    "zero_stage 1, 2": "unexpected space in 'zero_stage 1, 2': write zero_stage=1,2\n",
    "--cfg": "distexp: argument --cfg/-c: expected one argument: see distexp --help\n",
    "--config x": "distexp: --config is not an option: write --config-dir x\n",
    "--multirun=true": "ignored explicit argument 'true': see distexp --help\n",
    "--multirun zero_stage=1,2 --cfg job": "distexp: --multirun and --cfg exclude each other: use one of them\n",
    "zero_stage=1,2 --cfg job": "zero_stage=1,2 is a sweep, but --cfg and --info print one run: set one value\n",
    "cluster.environment.A=b=c": "distexp: cluster.environment.A=b=c needs quotes: write \"cluster.environment.A='b=c",
    "hydra.run.dir=out,a=b": "needs quotes: write \"hydra.run.dir='out,a=b'\"\n",
    "cluster.srun=[--mpi=none]": "needs quotes: write \"cluster.srun=['--mpi=none']\"\n",
    "name=a`b": "distexp: name=a`b needs quotes: write 'name='\"'\"'a`b'\"'\"''\n",
    "name=condé": "name=condé needs quotes: write \"name='condé'\"\n",
    "dataset=squad dataset.train_path=~/x.json": "does not replace there: write dataset.train_path=$HOME/x.json\n",
    "hydra.run.dir=~/x": "hydra.run.dir=~/x starts with ~, which the shell does not replace there: write hydra.run.dir"
    "=$HOME/x\n",
    "hydra.sweep.dir='~/x'": "hydra.sweep.dir=~/x starts with ~",
    "hydra.run.dir=": "distexp: hydra.run.dir= names no directory: write hydra.run.dir=DIR, or leave it out\n",
    "hydra.sweep.dir=null": "distexp: hydra.sweep.dir=null names no directory: write hydra.sweep.dir=DIR",
    "zero_stage=1,2": "zero_stage=1,2 is a sweep: add --multirun",
    "--multirun experiment=deepspeed/zero_stages,x": "cannot be swept",
    "--multirun cluster=local,slurm": "cluster=local,slurm cannot be swept",
    "--multirun cluster.dry_run=true,false": "cluster.dry_run=true,false cannot be swept",
    "--multirun strategy=ddp,fsdp hydra.run.dir=here": "set hydra.sweep.dir instead",
    "strategy=single hydra.run.dir=A hydra.sweep.dir=B": (
        "distexp: hydra.run.dir=A is the directory of a single run, and hydra.sweep.dir=B is for a sweep: leave one"
    ),
    "hydra.sweep.subdir=x hydra.run.dir=A": "hydra.sweep.subdir=x is for a sweep: leave one of them out\n",
    "hydra=null": "hydra=null is not an option: leave it out\n",
    "hydra/launcher=basic": "choose the launcher with cluster=",
    "strategy=[ddp,fsdp]": "strategy takes one option: add --multirun strategy=ddp,fsdp to compare them\n",
    "--multirun zero_stage=[1,2],3": "zero_stage takes one option: add --multirun zero_stage=1,2,3 to compare them",
    "model=[gpt_tiny]": "distexp: model=[gpt_tiny] is a list, but model takes one option: write model=gpt_tiny\n",
    "sweep.cells=[[strategy=single]]": "write 'sweep.cells=[[\"strategy=single\"]]'\n",
    "sweep.cells=[[zero_stage=1,2,offload=true],[model.depths=[1,2]]]": (
        'needs quotes: write \'sweep.cells=[["zero_stage=1,2","offload=true"],["model.depths=[1,2]"]]\'\n'
    ),
    "--multirn strategy=ddp": "distexp: --multirn is not an option. Did you mean --multirun?\n",
    "--config-di conf": "distexp: --config-di is not an option: write --config-dir conf\n",
    "--mult strategy=ddp,fsdp": "distexp: --mult is not an option: write --multirun\n",
    "--xyz": "distexp: --xyz is not an option: see distexp --help\n",
    "plan --js": "distexp: --js is not an option: write --json\n",
    "verify --quik": "distexp: --quik is not an option. Did you mean --quick?\n",
    "choose --xyz": "distexp: --xyz is not an option: see distexp choose --help\n",
    "choose.budget_min=5": "has no effect here: type distexp choose choose.budget_min=5, or leave it out\n",
    "--multirun train.seed=1,2 choose.gpus=[1,2]": "choose.gpus=[1,2] is for distexp choose",
    "--multirun choose.objective=throughput,memory": "choose.objective=throughput,memory is for distexp choose",
    "choose={budget_min:5}": "choose={budget_min:5} is for distexp choose",
    "multirun=true strategy=ddp": "multirun is not a key: write --multirun to start a sweep, or leave it out\n",
    "fsdp": "fsdp is neither a command nor KEY=VALUE: write strategy=fsdp\n",
    "zero-2": "zero-2 is neither a command nor KEY=VALUE: write zero_stage=2\n",
    "strategy:ddp": "strategy:ddp is neither a command nor KEY=VALUE: write strategy=ddp\n",
    "train strategy=ddp": "train is neither a command nor KEY=VALUE: to start a run, type distexp run, or leave the",
    "train.max_steps": "train.max_steps is neither a command nor KEY=VALUE: write train.max_steps=VALUE\n",
    "strategy=null": "strategy=null chooses no option of strategy: write strategy=OPTION, or leave it out\n",
    "--multirun zero_stage=null,2": "zero_stage=null,2 chooses no option of zero_stage",
    "train.betas=0.9,0.95": "write 'train.betas=[0.9,0.95]' for a list, or add --multirun\n",
    "train.betas=[0.9": "cannot be parsed, because [ is not closed: quote it for the shell: 'train.betas=...'\n",
    "strategy==fsdp": "distexp: strategy==fsdp has more than one =: write strategy=fsdp\n",
    "train.betas=[0.9,": "cannot be parsed, because [ is not closed: quote it for the shell: 'train.betas=...'\n",
    "train.betas=[0.9,]": "has a comma without a value, and train.betas must be 2 numbers, each from 0 to below 1, as",
    "train.betas=[0.9,,0.99]": "has a comma without a value: add the value, or write 'train.betas=[0.9,0.99]'\n",
    "--multirun train.betas=[0.9,],[0.8,0.9]": "and train.betas must be 2 numbers",
    "train.seed=,": "train.seed=, cannot be parsed: ",
    "strategy=ddp,,fsdp,": "has a comma without a value: add the value, or write strategy=ddp,fsdp\n",
    "strategy={name:fsdp}": "strategy={name:fsdp} is a section, but strategy takes an option: write strategy=OPTION\n",
    "train.seed=choice()": "train.seed=choice() has no values: write 'train.seed=choice(VALUE,VALUE)'\n",
    "strategy='ddp": "strategy='ddp cannot be parsed, because ' is not closed",
    "--multirun zero_stage=1 2": "2 is not KEY=VALUE: write for example strategy=fsdp. Separate several values",
    "choose choose.space=[strategy=ddp,sharding=full_shard]": (
        'needs quotes: write \'choose.space=["strategy=ddp","sharding=full_shard"]\'\n'
    ),
    "choose choose.space=[strategy=ddp,fsdp,train.micro_batch_size=2]": (
        'needs quotes: write \'choose.space=["strategy=ddp,fsdp","train.micro_batch_size=2"]\'\n'
    ),
    "choose choose.space=[strategy=ddp,deepspeed,offload,train.micro_batch_size]": (
        "needs quotes: write 'choose.space=[\"strategy=ddp,deepspeed\",offload,train.micro_batch_size]'\n"
    ),
    "choose choose.space=sharding=": "has sharding= without a value: write sharding=VALUE\n",
    "choose choose.space=kernels,strategy=ddp": "needs quotes: write 'choose.space=[kernels,\"strategy=ddp\"]'\n",
    "choose choose.space=strategy=ddp,kernels": "needs quotes: write 'choose.space=[\"strategy=ddp\",kernels]'\n",
    "choose strategy=ddp,fsdp": "use choose.space: write choose.space='[\"strategy=ddp,fsdp\"]'\n",
    "choose zero_stage=1,2,3 offload=true,false": 'choose.space=\'["zero_stage=1,2,3","offload=true,false"]\'\n',
    "choose choose.space.parallel.tensor=[1,2]": "because choose.space is a list: write choose.space=[...]",
    "train.betas.x=1": "because train.betas is a list: write train.betas=[...]",
    "hydra=x": "distexp: hydra=x is not an option: leave it out\n",
    "strategy=${nope}": "strategy=${nope} is a reference, but strategy takes an option: write strategy=OPTION\n",
    "plan choose.budget_min=5": "has no effect here: type distexp choose choose.budget_min=5, or leave it out\n",
    "plan forecast.memory=off": "has no effect here: type distexp forecast RUN forecast.memory=off, or",
    "choose choose.dry_run=true forecast.memory=off": "forecast.memory=off is for distexp forecast RUN",
    "kernels.compile=blocks": "kernels.compile cannot be set: set train.compile\n",
    "command=plan": "command cannot be set: type the name of the command first, as in distexp plan\n",
    "plan.output=json": "plan.output=json is for distexp plan and has no effect here: type distexp plan --json, or",
}
WRONG_VALUES = {  # overrides that are refused when they are composed or resolved
    "stratgy=ddp": "stratgy is not a key. Did you mean strategy?",
    "experment=x": "Did you mean experiment?",
    "train.epochs=0": "Did you mean train.num_epochs?",
    "strategy=fdsp": "strategy=fdsp is not an option. Did you mean fsdp? Options: ddp, deepspeed, fsdp, single",
    "strategy=FSDP": "strategy=FSDP is not an option. Did you mean fsdp? Options: ddp, deepspeed, fsdp, single\n",
    "strategy=zero2": "strategy=zero2 is not an option. Did you mean zero_stage=2? Options: ddp",
    "strategy=full_shard": "Did you mean sharding=full_shard? Options: ddp",
    "precision=BF16": "precision=BF16 is not an option. Did you mean bf16? Options: bf16, float8, fp16, fp32\n",
    "precision=float16": "precision=float16 is not an option. Did you mean fp16? Options: bf16, float8, fp16, fp32\n",
    "offload=cpu": "offload=cpu is not an option. Did you mean true? Options: false, pinned, true\n",
    "zero_stage=4": "zero_stage=4 is not an option. Options: 0, 1, 2, 3",
    "model=bloom": "Did you mean bloom_",
    "experiment=deepspeed/zero_stage": "deepspeed/zero_stages",
    "train.learning_rat=1": "Did you mean train.learning_rate?",
    "train.max_steps=abc": "train.max_steps=abc must be an integer or null",
    "train.micro_batch_size=abc": "distexp: train.micro_batch_size=abc must be a number (at least 1) or auto\n",
    "offload.enabled=maybe": "offload.enabled=maybe must be true or false",
    "train.checkpoint_every=[1]": "train.checkpoint_every=[1] must be an integer or epoch or null",
    "model.depths=[a]": "model.depths=[a] must be a list of integers, as in [1,2] or null",
    "cluster.sbatch=3": "cluster.sbatch=3 must be a mapping",
    "train.max_steps=-3": "train.max_steps=-3 must be at least 1",
    "train.schedule=exponential": "train.schedule=exponential is not one of linear, cosine, step, constant",
    "train.betas=[0.9,1.5]": "must be 2 numbers, each from 0 to below 1, as in [0.9,0.999]",
    "train.gradient_clipping=0": "must be above 0, or null (no clipping)",
    "train=5": "train=5 must be a section: set one of its keys, num_epochs",
    "train.lr=0.1": "train.lr is not a key. Did you mean train.learning_rate?\n",
    "strategy=": "distexp: strategy= is not an option. Options: ddp, deepspeed, fsdp, single\n",
    "+foo=1": "foo",
    "name=a/b": "name=a/b",
    "strategy=ddp offload=true": "choose strategy=fsdp",
    "precision=fp16 cluster.device=cpu": "precision=fp16 needs a GPU",
    "strategy=ddp zero_stage=1": "zero_stage=1 needs strategy=deepspeed",
    "strategy=single cluster.workers_per_node=2": "cluster.workers_per_node=2",
    "sharding=hybrid_shard fsdp.replicas=3": "fsdp.replicas=3 must divide",
    "fsdp.sharding=half strategy=fsdp": "fsdp.sharding=half is not one of",
    "zero_stage=3 train.compile=true": "train.compile=true",
    "model=resnet_tiny dataset=squad_sample": "or dataset=tinyimagenet_sample, tinyimagenet, image_folder or synthetic",
    "dataset=tinyimagenet": "or resnet50, or dataset=squad_sample, squad, text, chat or synthetic",
    "model=timm": "set it to the name of a model in this library, for example model.name=resnet18",
    "model=hf": "model.name is required: set it to a hub id or a folder, for example model.name=bigscience/bloom-560m",
    "model=torchvision model.name=resnet18 dataset=image_folder": "dataset=image_folder needs data: set dataset.path",
    "dataset=text dataset.path=": "dataset.path= is empty, as after an unset variable: give a value, or leave it out\n",
    "model=gpt_tiny dataset=synthetic dataset.max_length=256": "max_length=256 exceeds model.seq_length=128",
    "dataset.train_size=9 train.micro_batch_size=6": "train.micro_batch_size=6 is more than the 5 samples",
    "model.hidden_size=63": "multiple of model.num_heads=4",
    "model.ff_dim=64": "model.ff_dim=64 is not a key of model=bloom_tiny",
    "dataset.train_path=x.json": "is not a key of dataset=squad_sample: add dataset=squad, or leave it out\n",
    "sharding.x=1": "distexp: sharding has no keys: write sharding=OPTION\n",
    "+nonsense=1": "nonsense is not a key of the configuration",
    "model.task=text": "model.task=text is not one of causal_lm, seq2seq_lm",
    "model._target_=os.system": "trusted_packages=[os]",
    "deepspeed.config_file=/etc/hostname zero_stage=2": "is not a valid JSON object",
    "+hydra.sweep.subdir=q": "has a value already: leave the + out, as in hydra.sweep.subdir=VALUE\n",
    "~hydra.sweep.subdir": "hydra.sweep.subdir cannot be deleted: leave ~hydra.sweep.subdir out\n",
    "+train.seed=3": "distexp: train.seed has a value already: leave the + out, as in train.seed=VALUE\n",
    "+strategy=fsdp": "distexp: strategy has a value already: leave the + out, as in strategy=OPTION. In a file, write",
    "dataset=mine": "A custom option, in FOLDER/dataset/mine.yaml, needs --config-dir FOLDER\n",
    "offload=yes": "offload=yes is not an option. Did you mean true? Options: false, pinned, true\n",
    "name=${model.name} model=hf": "model.name is required: set it to a hub id or a folder",
    "model.command=x": "model.command is not a key. Did you mean dataset.column?\n",
    "cluster.timeout_min=00:30:00": "must be a number or null, in minutes: write cluster.timeout_min=30\n",
    "cluster.timeout_min=1-12:00:00": "in minutes: write cluster.timeout_min=2160\n",
    "cluster.timeout_min=1:30": (
        "cluster.timeout_min=1:30 must be a number or null, in minutes: write cluster.timeout_min=90 for 1 h 30 min, "
        "or cluster.timeout_min=1.5 for 1 min 30 s\n"
    ),
    "cluster.hang_timeout_min=90s": "must be a number, in minutes: write cluster.hang_timeout_min=1.5\n",
    "model=bloom_560": "from the hub or a folder: model=hf model.name=FOLDER_OR_HUB_ID\n",
    "model=/tmp/mymodel": "torchvision. For another model of transformers, from the hub or a folder: model=hf model.na"
    "me=/tmp/mymodel\n",
    "model=bigscience/bloom-560m": "from the hub or a folder: model=hf model.name=bigscience/bloom-560m\n",
    "train.betas=[0.9,[1]]": "train.betas=[0.9, [1]] must be a list of numbers, as in [0.9,0.99]\n",
    "cluster.environment=[1]": "distexp: cluster.environment=[1] must be a mapping of texts, as in {key: value}\n",
    "cluster.environment={1:2}": "has a key that is not a text: write cluster.environment={NAME:VALUE}\n",
    "hydra.job.chdir=maybe": "distexp: hydra.job.chdir=maybe is not accepted (Value 'maybe' is not a valid bool",
    "train.seed=${nope}": "distexp: train.seed=${nope} refers to nope, which is not a key: write train.seed=VALUE\n",
    "train.seed=${train.sed}": "refers to train.sed, which is not a key: write ${train.seed}, or a value\n",
    "train.seed=${train.seed}": "distexp: train.seed=${train.seed} refers to itself: write train.seed=VALUE\n",
    "train.seed=${oc.env:NOPE}": "needs the environment variable NOPE, which is not set: set it, or write train.seed=",
    "dataset=squad dataset.path=/nowhere": "dataset.path=/nowhere does not exist: correct the path, or use a hub id",
    "dataset=squad dataset.path='~/nowhere'": "dataset.path=~/nowhere does not exist",
    "model.tokenizer=/nowhere": "model.tokenizer=/nowhere does not exist",
    "train.resume=/nowhere": "train.resume=/nowhere contains no checkpoint",
    "zero_stage=2 deepspeed.config_file=/nowhere": "deepspeed.config_file=/nowhere is not a file",
    "model=resnet_tiny dataset=tinyimagenet dataset.root=/nowhere": "dataset.root=/nowhere is not a folder",
}
FURTHER_WRONG_VALUES = {
    "strateggy=fsdp": "Did you mean strategy?",
    "train.hidden_size=8": "Did you mean model.hidden_size?",
    "train.micro_batch_size=2.5": "train.micro_batch_size=2.5 must be an integer or auto\n",
    "train.learning_rate=abc": "train.learning_rate=abc must be a number",
    "train.seed=null": "train.seed=null must be an integer",
    "train.micro_batch_size=0": "train.micro_batch_size=0 must be at least 1",
    "train.optimizer=lion": "train.optimizer=lion is not one of",
    "train.betas=[0.9]": "train.betas=[0.9] must be 2 numbers",
    "train.batch_size=8": "train.batch_size is not a key. Did you mean train.micro_batch_size?\n",
    "cluster.gpus=2": "cluster.gpus is not a key. Did you mean cluster.workers_per_node?\n",
    "strategy=single offload=true": "offload=true",
    "zero_stage=0 offload=true": "zero_stage=0 partitions none",
    "zero_stage=2 offload=pinned cluster.device=cpu": "offload=pinned needs a GPU",
    "zero_stage=1 sharding=full_shard": "sharding=full_shard needs strategy=fsdp",
    "sharding=full_shard fsdp.replicas=2": "choose sharding=hybrid_shard",
    "dataset.image_size=32": "dataset.image_size=32 is not a key of dataset=squad_sample",
    "dataset=squad dataset.train_path=/nowhere.json dataset.eval_path=/nowhere.json": "/nowhere.json",
    "dataset=squad dataset.train_path=/etc/hostname": "dataset.eval_path",
    "model=resnet_tiny dataset=tinyimagenet": "dataset.root",
    "+model.nonsense=1": "model.nonsense is not a key",
    "dataset.task=words": "dataset.task=words is not one of causal_lm, seq2seq_lm",
    "cluster.hang_timeout_min=1e-9": "cluster.hang_timeout_min=1e-09 must be from 0.01 to below 30000\n",
    "cluster.timeout=10": "cluster.timeout is not a key. Did you mean cluster.timeout_min?\n",
    "cluster.timeout_min=1mo": "cluster.timeout_min=1mo must be a number or null\n",
    "cluster.time=10": "cluster.time is not a key. Did you mean cluster.timeout_min?\n",
    "name=${nope}": "distexp: name=${nope} refers to nope, which is not a key: write name=VALUE\n",
    "dataset=squad dataset.path=./nowhere": "dataset.path=./nowhere does not exist",
}
WRONG = {  # command lines that only the whole command refuses, and one of each of the kinds above
    "profile=5": "distexp: profile=5 must be true or false: for 5 steps write train.profile_steps=5\n",
    '--multirun sweep.cells=[["profile=2"]]': "profile=2 must be true or false: for 2 steps",
    "plan --json strategy=ddp plan": "plan is a command, which must come first: type distexp plan strategy=ddp\n",
    "run status": "status is a command, which must come first: type distexp status\n",
    "model.name=gpt2": "only renames model=bloom_tiny: write model=hf model.name=gpt2, or leave it out\n",
    "strategy._target_=distexp.strategies.fsdp.FSDP": "is that of strategy=fsdp: write strategy=fsdp\n",
    "strategy=ddp strategy.options.a=1": "distexp: strategy.options.a=1 is for custom strategies, but this run has",
    "cluster.environment.OMP_NUM_THREADS=1": "may not set OMP_NUM_THREADS: set cluster.cpus_per_worker instead\n",
    "strategy=ddp deepspeed.config_file=/etc/hostname": "needs strategy=deepspeed, but this run has strategy=ddp: ",
    "--multirun strategy=ddp,single fsdp.wrap=none": "needs strategy=fsdp, but these runs have strategy=ddp,single",
    "--multirun train.seed=1,2 hydra.sweep.subdir=same": "hydra.sweep.subdir=same gives run 0 and run 1 one folder",
    "--multirun train.seed=1,2 hydra.sweep.subdir='${hydra.job.num}/../x'": "/../x gives run 0 and run 1 one folder",
    "sweep.cells=[['+strategy.name=fsdp']]": "distexp: strategy.name has a value already: leave the + out, as in",
    "experiment=deepspeed/pin_memory hydra.run.dir=here": "set hydra.sweep.dir only",
    "--multirun strategy=glob(d*) cluster.dry_run=true": "distexp: cluster.dry_run=true is for Slurm only",
    "hydra.run.dir=/proc/foo": "distexp: /proc/foo cannot be made: choose another directory with hydra.run.dir=DIR\n",
    "--multirun train.seed=glob(*)": "the sweep has 0 cells: start one with 1 to 100,000 cells\n",
    "repeats=1000000000": "the sweep has 1,000,000,000 cells",
    "--multirun strategy=ddp,fdsp": "Did you mean fsdp",
    "sweep.cells=[['offload=[true,false]']]": "offload takes one option: add --multirun offload=true,false",
    "--multirun sweep.cells=[['a=1']],[['a=2']]": "is more than one list: write sweep.cells=[[...],[...]]\n",
    "sweep.cells=[['hydra={verbose:true}']]": "sweep.cells sets hydra={verbose:true}, which is the same for all runs",
    "sweep.cells=[1]": "each cell must be a list of overrides",
    "--config-dir /nowhere": "'/nowhere' not found: give an existing folder to --config-dir\n",
    "cancel --ye": "distexp: --ye is not an option: see distexp cancel --help\n",
    "--config-name foo": "Cannot find primary config 'foo': leave --config-name and --config-path out. A folder with ",
    "choose choose.budget_min=1h30m": "must be a number, in minutes: write choose.budget_min=90\n",
    "plan plan.timeout_s=5m": "must be a number or null, in seconds: write plan.timeout_s=300\n",
    "choose choose.space=[{tensor:[1,2]}]": "choose.space=[{'tensor': [1, 2]}] must be a list of texts, as in [a,b]\n",
    "cluster.environment.A=null": "distexp: cluster.environment.A=null must be a text: give the variable one value\n",
    f"train.max_steps=0x{'f' * 5000}": "distexp: train.max_steps=0xfffffffffffffffffffffffffffffffffffffff... must",
    "choose choose.gpus=0": "choose.gpus=[0] must be numbers, each at least 1\n",
    "choose choose.budget_min=0": "distexp: choose.budget_min=0 must be above 0\n",
    "plan plan.search_timeout_s=5": "has no effect in distexp plan, which predicts every change: leave it out\n",
    "choose plan=off": "plan=off has no effect in distexp choose, which always predicts: leave it out\n",
    "stratgy=ddp": "stratgy is not a key. Did you mean strategy?",
    "--offload": "--offload is not an option: write offload=VALUE",
    "strategy=ddp offload=true": "choose strategy=fsdp",
}
FURTHER_WRONG = {
    "--multirun profile=true,5": "distexp: profile=5 must be true or false: for 5 steps write train.profile_steps=5\n",
    "cluster.wait=2": "distexp: cluster.wait=2 must be true or false\n",
    "strategy.name=fsdp": "strategy.name=fsdp only renames strategy=ddp: write strategy=fsdp, or leave it out\n",
    "scale.name=tiny": "scale.name=tiny only renames scale=full: write scale=tiny, or leave it out\n",
    "tracker.name=x": "tracker.name=x only renames tracker=none: leave it out\n",
    "strategy=ddp strategy.options={a:1}": "={a:1} is for custom strategies, but this run has",
    "--multirun train.seed=1,2 ++hydra.sweep.subdir=same": "hydra.sweep.subdir=same gives run 0 and run 1 one folder",
    "--multirun train.seed=1,2 hydra.sweep={dir:x,subdir:y}": "hydra.sweep.subdir=y gives run 0 and run 1 one folder",
    "--multirun train.seed=1,2 hydra={sweep:{subdir:y}}": "hydra.sweep.subdir=y gives run 0 and run 1 one folder",
    "sweep.cells=[['hydra.verbose=true']]": "sweep.cells sets hydra.verbose=true, which is the same for all runs",
    "plan plan.timeout_s=1hour30mins": "must be a number or null, in seconds: write plan.timeout_s=5400\n",
    "plan plan.timeout_s=500ms": "plan.timeout_s=500ms must be a number or null\n",
    "plan plan.timeout_s=soon": "plan.timeout_s=soon must be a number or null\n",
    "choose choose.gpus=[[1]]": "choose.gpus=[[1]] must be a list of integers, as in [1,2]\n",
    "cluster.environment={A:{b:1}}": "cluster.environment={'A': {'b': 1}} must be a mapping of texts, as in {key",
    "choose choose.objective=speed": "choose.objective=speed is not one of throughput, energy, cost, memory\n",
    "--multirun plan=off,warn plan.timeout_s=5": "plan.timeout_s=5 has no effect with plan=warn, which only",
}

GO_TOGETHER = (  # what users of the Trainer, Megatron and Lightning type, with answers that one run can have
    *("bf16=true", "use_cpu=true", "gradient_checkpointing=true", "per_device_train_batch_size=2", "max_seq_length=64"),
    *("per_device_eval_batch_size=2", "num_train_epochs=3", "--train-iters 10", "clip_grad=1.0", "logging_steps=5"),
    *("save_steps=10", "lr_scheduler_type=constant_with_warmup", "dataloader_num_workers=1", "adam_epsilon=1e-6"),
    *("output_dir=here", "run_name=mine", "report_to=tensorboard", "dataset_name=squad_sample", "lora_r=4"),
    *("lora_alpha=8", "lora_dropout=0.1", "attn_implementation=sdpa", "optim=adamw_torch", "num_machines=1"),
)
PAIR = "cluster.workers_per_node=2 strategy=ddp model=gpt_tiny dataset=synthetic train.gradient_accumulation_steps=2"
OF_OTHER_PROGRAMS = {  # what users of torchrun and DeepSpeed type too, with overrides that allow it
    **dict.fromkeys(("parallel.tp=2", "--pipeline-model-parallel-size=2", "context_parallel_size=2"), PAIR),
    **dict.fromkeys(("deepspeed=ds.json", "--deepspeed", "--zero-stage 2", "fsdp=full_shard"), ""),
    **dict.fromkeys(("--nproc_per_node 4", "parallel.dp=2"), "strategy=ddp"),
    "train_batch_size=8": "strategy=single",
    "fp16=true": "cluster=slurm cluster.partition=gpu",
    **dict.fromkeys(("--recompute-granularity full", "torch_compile=true", "fsdp_sharding_strategy=FULL_SHARD"), ""),
    "--use-distributed-optimizer": "strategy=deepspeed",
}
FURTHER_OF_OTHER_PROGRAMS = {
    **dict.fromkeys(("tensor_parallel=2", "--tensor-model-parallel-size 2", "parallel.pp=2"), PAIR),
    **dict.fromkeys(("pipeline_parallel=2", "parallel.cp=2", "parallel.sp=2", "sequence_parallel=2"), PAIR),
    **dict.fromkeys(("--deepspeed_config ds.json", "--deepspeed ds.json", "zero_optimization.stage=2", "stage=1"), ""),
    **dict.fromkeys(("--nproc-per-node=4", "--nnodes 2", "--num_gpus 2"), "strategy=ddp"),
    **dict.fromkeys(("--bf16", "mixed_precision=bf16", "precision.bf16=true", "--recompute-activations"), ""),
    **dict.fromkeys(("--train_micro_batch_size_per_gpu 2", "lr_scheduler_type=linear", "adapter.r=8"), ""),
    **dict.fromkeys(("lr_scheduler_type=cosine", "max_epochs=2"), ""),
    "gradient_clip_val=1.0": "strategy=deepspeed",
}


def answer(typed: str) -> list[str]:
    """Return the overrides in the message about a name of another program."""
    with pytest.raises(ConfigError) as caught:
        normalize_arguments(typed.split())
    (message,) = caught.value.errors
    assert message.startswith(typed.replace("=", " ").split()[0])
    overrides = message.partition(": write ")[2].split()
    assert overrides, message
    return overrides


def test_names_of_other_programs_are_answered_with_what_works_in_one_run() -> None:
    resolve_cell(*dict.fromkeys(override for typed in GO_TOGETHER for override in answer(typed)))
    for typed in FURTHER_OF_OTHER_PROGRAMS:
        assert all("=" in override for override in answer(typed))


@pytest.mark.parametrize(
    ("typed", "others"),
    [
        *OF_OTHER_PROGRAMS.items(),
        *(pytest.param(*case, marks=pytest.mark.release) for case in FURTHER_OF_OTHER_PROGRAMS.items()),
    ],
)
def test_a_name_of_another_program_is_answered_with_what_works(
    typed: str, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    resolve_cell(*others.split(), *answer(typed))


@pytest.mark.parametrize(
    ("typed", "override"),
    [
        ("fp8=true", "precision=float8"),
        ("precision.float8=true", "precision=float8"),
        ("optim=adamw_bnb_8bit", "train.optimizer=adamw8bit"),
        ("save_strategy=steps", "train.checkpoint_every=100"),
        ("fsdp=full_shard offload", "sharding=full_shard offload=true"),
        ("virtual_pipeline_model_parallel_size=2", "parallel.schedule=interleaved"),
        ("lr_scheduler_type=of", "train.schedule=VALUE, with one of linear, cosine, step, constant"),
        ("lr_scheduler_type=polynomial", "train.schedule=VALUE, with one of linear, cosine, step, constant"),
        ("fsdp_sharding_strategy=x", "sharding=VALUE, with one of full_shard, hybrid_shard, no_shard, shard_grad_op"),
    ],
)
def test_names_whose_options_need_other_machines_are_answered(typed: str, override: str) -> None:
    with pytest.raises(ConfigError, match=f": write {override}$"):
        normalize_arguments([typed])


@pytest.mark.parametrize("typed", ["~parallel", "~cluster", "~train.seed", "~name", "~nope", "~strategy"])
def test_nothing_that_every_run_has_can_be_deleted(typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        normalize_arguments([typed])
    (message,) = caught.value.errors
    assert message.startswith(typed)
    assert "leave it out" in message or "Did you mean" in message


@pytest.mark.parametrize("typed", ["--standalone", "fp16=false", "sequence_parallel=true", "do_train=true"])
def test_what_distexp_needs_not_is_to_be_left_out(typed: str) -> None:
    with pytest.raises(ConfigError, match=": leave it out"):
        normalize_arguments([typed])


@pytest.mark.parametrize("line", WRONG_WORDS)
def test_wrong_words_are_refused_before_hydra_starts(line: str) -> None:
    name, *others = line.split()
    is_command = name in ("choose", "plan", "preflight", "verify")
    with pytest.raises((ConfigError, HydraException)) as caught:
        normalize_arguments(others if is_command else line.split(), Command(name) if is_command else Command.TRAIN)
    printed = printed_errors(caught.value)
    assert WRONG_WORDS[line] in printed
    assert "--cfg" in line or "--cfg and --info" not in printed, "neither was typed"


def printed_errors(error: Exception) -> str:
    """Return what the command prints about an error."""
    return "".join(f"distexp: {message}\n" for message in explain(error))


def in_release(lines: Iterable[str]) -> Iterator[ParameterSet]:
    """Yield further command lines of kinds that continuous integration tests with others."""
    return (pytest.param(line, marks=pytest.mark.release) for line in lines)


@pytest.mark.parametrize("line", [*WRONG_VALUES, *in_release(FURTHER_WRONG_VALUES)])
def test_wrong_values_are_explained(line: str) -> None:
    with pytest.raises((ConfigError, HydraException, OmegaConfBaseException)) as caught:
        resolve_cell(*line.split())
    assert {**WRONG_VALUES, **FURTHER_WRONG_VALUES}[line] in printed_errors(caught.value)


@pytest.mark.parametrize("line", [*WRONG, *in_release(FURTHER_WRONG)])
def test_wrong_command_line_prints_one_message(line: str, tmp_path: Path) -> None:
    done = run_distexp(*line.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert {**WRONG, **FURTHER_WRONG}[line] in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == [], "something was left behind"


FILES = {  # presets, with the message about each
    "- a\n": "distexp: experiment/mine.yaml: experiment is a group and not a section: write '# @package _global_'",
    "train: [\n": "mine.yaml is not valid YAML in line 2: expected the node content",
    "# @package _global_\ntrain: {sed: 1}\n": "distexp: experiment/mine.yaml: train.sed is not a key. Did you mean",
    "# @package _global_\nhydra: {run: {dir: out}, sweep: {dir: swept}}\n": "distexp: hydra.run.dir=out has no effect",
    "# @package _global_\nsharding: {x: 1}\n": "distexp: experiment/mine.yaml: sharding has no keys: write sharding=",
    "# @package _global_\nhydra: {run: {dir: '${hydra:runtime.cwd}/x'}}\n": "type hydra.run.dir=DIR for a single run",
}


@pytest.mark.parametrize("content", FILES)
def test_an_error_in_a_preset_names_the_file(content: str, tmp_path: Path) -> None:
    preset = tmp_path / "experiment" / "mine.yaml"
    preset.parent.mkdir()
    preset.write_text(content)
    done = run_distexp("--config-dir", str(tmp_path), "experiment=mine", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert FILES[content] in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]


def test_a_preset_that_is_not_in_utf_8_is_an_error(tmp_path: Path) -> None:
    preset = tmp_path / "experiment" / "mine.yaml"
    preset.parent.mkdir()
    preset.write_bytes("# @package _global_\n# Réglages\n".encode("latin-1"))
    done = run_distexp("--config-dir", str(tmp_path), "experiment=mine", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("distexp: experiment/mine.yaml is not in UTF-8 ('utf-8' codec can't decode byte")
    assert done.stderr.endswith(": save it in UTF-8\n")


def test_the_help_of_hydra_is_printed(tmp_path: Path) -> None:
    assert "== Flags ==" in run_distexp("--hydra-help", cwd=tmp_path).stdout


def test_an_output_folder_may_start_with_a_tilde() -> None:
    assert "hydra.sweep.dir='~tmp'" in normalize_arguments(["hydra.sweep.dir='~tmp'"])


def test_a_key_of_another_command_is_accepted_with_its_default() -> None:
    defaults = ["choose.budget_min=10", "choose.objective='throughput'", "forecast.network=null", "plan.output=table"]
    assert normalize_arguments(defaults)[1:] == defaults
    assert "choose.budget_min=5" in normalize_arguments(["choose.budget_min=5"], Command.CHOOSE)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (
            "strategy=ddp,fsdp zero_stage=2",
            "zero_stage=2 is for strategy=deepspeed, so all cells are invalid: to compare them, "
            "write strategy=ddp,fsdp,deepspeed without zero_stage=2 (the default), or "
            """'sweep.cells=[["strategy=ddp,fsdp"],["zero_stage=2"]]'""",
        ),
        (
            "strategy=ddp,fsdp,deepspeed zero_stage=1,3",
            "zero_stage=1,3 is for strategy=deepspeed, so the cells with strategy=ddp,fsdp are invalid: to compare "
            """them, write 'sweep.cells=[["strategy=ddp,fsdp"],["zero_stage=1,3"]]'""",
        ),
        (
            "strategy=ddp,fsdp sharding=no_shard",
            "sharding=no_shard is for strategy=fsdp, so the cells with strategy=ddp are invalid: to compare them, "
            """write 'sweep.cells=[["strategy=ddp"],["sharding=no_shard"]]'""",
        ),
        (
            "strategy=ddp,fsdp zero_stage=2 sharding=full_shard",
            "sharding=full_shard is for strategy=fsdp and zero_stage=2 is for strategy=deepspeed, so all cells are "
            "invalid: to compare them, write strategy=ddp,fsdp,deepspeed without sharding=full_shard and zero_stage=2 "
            """(the defaults), or 'sweep.cells=[["strategy=ddp"],["sharding=full_shard"],["zero_stage=2"]]'""",
        ),
        (
            "strategy=fsdp,deepspeed zero_stage=1,2 sharding=no_shard",
            "sharding=no_shard is for strategy=fsdp and zero_stage=1,2 is for strategy=deepspeed, so all cells are "
            """invalid: to compare them, write 'sweep.cells=[["sharding=no_shard"],["zero_stage=1,2"]]'""",
        ),
        (
            "strategy=single,ddp,fsdp cluster.workers_per_node=2",
            "strategy=single trains on one worker, so it is invalid with cluster.workers_per_node=2: to compare it "
            """with the others, write 'sweep.cells=[["strategy=single","cluster.workers_per_node=1"],"""
            """["strategy=ddp,fsdp","cluster.workers_per_node=2"]]' instead""",
        ),
        (
            "strategy=single,ddp cluster.nodes=2 cluster.workers_per_node=2,4",
            "strategy=single trains on one worker, so it is invalid with cluster.nodes=2 or "
            "cluster.workers_per_node=2,4: to compare it with the others, write "
            """'sweep.cells=[["strategy=single","cluster.nodes=1","cluster.workers_per_node=1"],"""
            """["strategy=ddp","cluster.nodes=2","cluster.workers_per_node=2,4"]]' instead""",
        ),
        (
            "strategy=single,ddp cluster.workers_per_node=1,2",
            "strategy=single trains on one worker, so it is invalid with cluster.workers_per_node=2: to compare it "
            """with the others, write 'sweep.cells=[["strategy=single","cluster.workers_per_node=1"],"""
            """["strategy=ddp","cluster.workers_per_node=1,2"]]' instead""",
        ),
        (
            "strategy=single,deepspeed zero_stage=1,2 cluster.workers_per_node=2",
            "zero_stage=1,2 is for strategy=deepspeed and strategy=single trains on one worker, so the cells with "
            "strategy=single are invalid: to compare them, write "
            """'sweep.cells=[["strategy=single","cluster.workers_per_node=1"],"""
            """["zero_stage=1,2","cluster.workers_per_node=2"]]'""",
        ),
        (
            "strategy=single,ddp zero_stage=2 cluster.workers_per_node=2",
            "zero_stage=2 is for strategy=deepspeed and strategy=single trains on one worker, so all cells are "
            "invalid: to compare them, write "
            """'sweep.cells=[["strategy=single","cluster.workers_per_node=1"],"""
            """["strategy=ddp","cluster.workers_per_node=2"],["zero_stage=2","cluster.workers_per_node=2"]]'""",
        ),
    ],
)
def test_a_sweep_over_strategies_with_an_option_of_one_gets_a_hint(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    normalize_arguments(["--multirun", *line.split()])
    assert capsys.readouterr().err == f"distexp: warning: {hint}\n"


@pytest.mark.parametrize(
    "line",
    [
        "strategy=ddp,deepspeed",
        "strategy=glob(*) zero_stage=2",
        "zero_stage=1,2",
        "strategy=single,ddp cluster.workers_per_node=1",
        "strategy=single,ddp cluster.workers_per_node=null,1",
        "strategy=ddp,fsdp cluster.workers_per_node=2",
    ],
)
def test_other_sweeps_get_no_hint(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    normalize_arguments(["--multirun", *line.split()])
    assert capsys.readouterr().err == ""


def test_an_exercise_without_a_gpu_names_the_device_first() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_cell("experiment=ddp/baseline", "dataset.root=nowhere", "cluster.device=cpu")
    assert caught.value.errors[0] == (
        "experiment=ddp/baseline needs GPUs, but this run is on cpu: add scale=tiny to run it on CPUs, or "
        "cluster=slurm to run it on a cluster"
    )


def test_a_dataset_of_another_task_is_one_error(tmp_path: Path) -> None:
    done = run_distexp("dataset=tinyimagenet", "model=gpt_tiny", cwd=tmp_path)
    (message,) = done.stderr.splitlines()
    assert message.startswith("distexp: dataset=tinyimagenet is for image_classification, but model=gpt_tiny")


def test_hydra_full_error_prints_the_traceback(tmp_path: Path) -> None:
    done = run_distexp("train.max_steps=0", cwd=tmp_path, env={"HYDRA_FULL_ERROR": "1"})
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_help_lists_commands_groups_and_examples() -> None:
    done = run_distexp("--help")
    assert done.returncode == 0
    for text in ("commands:", "  status ", "groups:", "hybrid_shard", "(implies strategy=fsdp)", "--cfg job"):
        assert text in done.stdout


def test_help_is_a_command_too() -> None:
    text = run_distexp("--help", env={"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "docs/workshop.md" in text
    assert run_module("distexp.help", env={"COLUMNS": "80"}).stdout == text
    assert run_distexp("help", "status").stdout == run_distexp("status", "--help").stdout
    wrong = run_distexp("help", "statsu")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "distexp: statsu is not a command, a group or a key. Did you mean status?\n",
    )


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "zero_stage",
            ("zero_stage: what DeepSpeed partitions", "zero_stage=2\n", "Optimizer states and gradients are"),
        ),
        (
            "deepspeed/zero_stages",
            ("experiment=deepspeed/zero_stages\n", "  distexp experiment=deepspeed/zero_stages cl"),
        ),
        ("strategy=fsdp", ("strategy=fsdp\n", "FSDP2")),
        ("train", ("  train.num_epochs\n", "Passes over the training set.")),
        ("lr", ("train.learning_rate\n", "Values: at least 0.", "Default: 5e-05.")),
        ("cluster.nodes", ("cluster.nodes\n", "distexp cluster.nodes=VALUE")),
        ("sequence_length", ("dataset.max_length\n", "Most tokens of a sample")),
        ("FSDP", ("strategy=fsdp\n", "FSDP2")),
        ("profile", ("profile\n", "train.profile_steps=3", "distexp profile=VALUE")),
        ("choose.gpus", ("choose.gpus\n", "  distexp choose choose.gpus=VALUE")),
        ("plan.gpu", ("plan.gpu\n", "  distexp plan.gpu=VALUE")),
        ("scale.layers", ("scale.layers\n", "  distexp scale=tiny scale.layers=VALUE")),
        ("tracker.name", ("tracker.name\n", "  distexp tracker=OPTION\n")),
        ("model.name", ("model.name\n", "  distexp model=hf model.name=VALUE\n")),
        ("cluster._target_", ("  cluster._target_ cannot be set: choose the launcher with cluster=\n",)),
    ],
)
def test_help_explains_groups_options_and_keys(
    name: str, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert help_main([name]) == 0
    shown = capsys.readouterr().out
    for text in texts:
        assert text in shown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_stge", "zero_stge is not a command, a group or a key. Did you mean zero_stage?"),
        ("ZeRO", "ZeRO is not a command, a group or a key. Did you mean zero_stage?"),
        ("xyz", "xyz is not a command, a group or a key: see distexp help"),
        ("zero_stage=7", "zero_stage=7 is not an option. Options: 0, 1, 2, 3"),
        ("strategy=fsdq", "strategy=fsdq is not an option. Did you mean fsdp? Options: ddp, deepspeed, fsdp, single"),
    ],
)
def test_help_suggests_a_name(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_main([name]) == 2
    assert capsys.readouterr().err == f"distexp: {message}\n"


@pytest.mark.parametrize("option", [("--config-dir", "my_conf"), ("--config-dir=my_conf",)])
def test_help_explains_an_option_of_a_folder(
    option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    (tmp_path / "my_conf" / "model" / "mine.yaml").write_text("# A model of mine.\nname: mine\n")
    for arguments in ((*option, "model=mine"), ("model=mine", *option)):
        assert help_main(arguments) == 0
        assert capsys.readouterr().out == "model=mine\n  A model of mine.\n"
    assert help_main([*option, "mine"]) == 0
    assert capsys.readouterr().out == "model=mine\n  A model of mine.\n"
    assert help_main([*option, "model"]) == 0
    assert "  model=mine\n      A model of mine.\n" in capsys.readouterr().out
    assert help_main(["--config-dir=nosuch", "mine"]) == 2
    assert capsys.readouterr().err == "distexp: nosuch is no folder: give an existing one to --config-dir\n"
    assert help_main(["model=mine"]) == 2
    assert "needs --config-dir FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["distexp.experiments", "distexp"])
def test_closed_stdout_ends_the_command_quietly(module: str) -> None:
    command = [sys.executable, "-m", module, *(["--help"] if module == "distexp" else [])]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        reading.stdout.close()  # as head does
        assert reading.stderr.read() == ""
    assert reading.returncode == 128 + signal.SIGPIPE


def test_cfg_job_prints_the_configuration(tmp_path: Path) -> None:
    done = run_distexp("--cfg", "job", "zero_stage=3", "offload=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero_stage: 3" in done.stdout
    assert "name: deepspeed" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_cfg_of_one_package_and_info() -> None:
    assert "learning_rate" in run_distexp("--cfg", "job", "--package", "train").stdout
    assert "zero_stage: null" in run_distexp("--info", "defaults-tree").stdout


def test_tab_completion_offers_groups_options_and_keys() -> None:
    def complete(line: str) -> list[str]:
        env = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        return run_distexp("-sc", "query=bash", env=env).stdout.split()

    assert "strategy=" in complete("distexp strat")
    assert {"sharding=full_shard", "sharding=hybrid_shard"} <= set(complete("distexp sharding="))
    assert "zero_stage=3" in complete("distexp zero_stage=")
    assert "train.learning_rate=" in complete("distexp train.lear")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("profile: 5", "experiment/mine.yaml: profile=5 must be true or false: for 5 steps write train.profile_steps"),
        ("hydra: {sweeper: {params: {profile: '5,true'}}}", "profile=5 must be true or false: for 5 steps write"),
        ("sweep: {cells: [[profile=5]]}", "profile=5 must be true or false: for 5 steps write"),
    ],
)
def test_wrong_value_of_a_preset_is_refused_like_an_override(preset: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"# @package _global_\n{preset}\n")
    done = run_distexp("--config-dir", str(tmp_path), "experiment=mine", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith(f"distexp: {message}"), done.stderr


def test_texts_of_environment_variables_may_be_true_or_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "1")
    done = run_distexp("profile=${oc.env:MINE}", "--cfg", "job", "-p", "profile", "--resolve", cwd=tmp_path)
    assert done.stdout.startswith("True"), done.stderr


HARMFUL = "from pathlib import Path\n\nPath('started').touch()\n"
FILES_THAT_TRUST = {  # what a preset from a stranger contains, with a part of the message
    "key": ("trusted_packages: [strange]\n", "is set by "),
    "interpolation": ("trusted_packages: ['${model.tokenizer}']\n", "trusted_packages=[strange]"),
    "swept key": ("hydra: {sweeper: {params: {trusted_packages: '[strange]'}}}\n", "trusted_packages=[strange]"),
    "cell": ("sweep: {cells: [['trusted_packages=[strange]']]}\n", "trusted_packages=[strange]"),
    "override of Hydra": ("hydra: {overrides: {task: ['trusted_packages=[strange]']}}\n", "trusted_packages=[strange]"),
}


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """Return a folder with a package of a stranger; importing it leaves the file ``started``."""
    (tmp_path / "strange.py").write_text(HARMFUL)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    return tmp_path


def run_preset(folder: Path, trust: str, *overrides: str, env: dict[str, str] | None = None) -> str:
    """Run a preset with a ``_target_`` in the strange package; return the messages of the command."""
    preset = "# @package _global_\nmodel: {_target_: strange.build, task: causal_lm, tokenizer: strange}\n"
    (folder / "conf" / "experiment" / "theirs.yaml").write_text(preset + trust)
    done = run_distexp("--config-dir", "conf", "experiment=theirs", *overrides, cwd=folder, env=env)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("case", FILES_THAT_TRUST)
def test_a_file_cannot_trust_a_package(case: str, stranger: Path) -> None:
    trust, expected = FILES_THAT_TRUST[case]
    (message,) = run_preset(stranger, trust).splitlines()
    assert expected in message
    assert case != "key" or f"{stranger / 'conf' / 'experiment' / 'theirs.yaml'}" in message
    assert "if you trust its code, add trusted_packages=[strange] to the command" in message
    assert {path.name for path in stranger.iterdir()} == {"conf", "strange.py"}, "nothing was imported or started"


TRUSTED_BY_USER = {  # overrides and environment that trust the package
    "override": (("trusted_packages=[strange]",), {}),
    "environment": ((), {"DISTEXP_TRUSTED_PACKAGES": "other, strange"}),
}


FURTHER_TRUSTED_BY_USER = {
    "added override": (("++trusted_packages=['strange']",), {}),
    "typed cell": (('sweep.cells=[["trusted_packages=[strange]"]]',), {}),
}


@pytest.mark.parametrize("case", [*TRUSTED_BY_USER, *in_release(FURTHER_TRUSTED_BY_USER)])
def test_the_user_can_trust_a_package(case: str, stranger: Path) -> None:
    overrides, env = {**TRUSTED_BY_USER, **FURTHER_TRUSTED_BY_USER}[case]
    stop = "dataset.path=/nowhere"  # A later check, so that no run starts.
    message = run_preset(stranger, "", "dataset=squad", stop, *overrides, env=env)
    assert "/nowhere does not exist" in message
    assert "trusted_packages" not in message


def test_options_are_accepted_anywhere_among_the_overrides(tmp_path: Path) -> None:
    folder = tmp_path / "my_conf" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package model\n_target_: mypackage.build\nname: mine\ntask: causal_lm\n")
    printed = run_distexp("train.seed=7", "--cfg", "job", "--config-dir", "my_conf", "model=mine", cwd=tmp_path)
    assert "_target_: mypackage.build" in printed.stdout
    assert "seed: 7" in printed.stdout
    swept = run_distexp("--multirun", "train.seed=7,8", "--config-dir", "my_conf", "model=mine", cwd=tmp_path)
    assert "trusted_packages=[mypackage]" in swept.stdout
    assert "usage:" not in swept.stderr


def make_sweep(root: Path, name: str, changed_at: float) -> Path:
    """Write a sweep of one finished run below the default folder."""
    sweep = root / "multirun_outputs" / "distexp" / name
    write(sweep, record(0))
    (sweep / "command.json").write_text(json.dumps({"words": [], "directory": str(root), "cells": 1}))
    os.utime(sweep / "command.json", (changed_at, changed_at))
    return sweep


@pytest.mark.parametrize("command", ["status", "report"])
def test_newest_sweep_is_the_default_folder(command: str, tmp_path: Path) -> None:
    make_sweep(tmp_path, "a_newer", changed_at=2000)
    make_sweep(tmp_path, "b_older", changed_at=1000)
    done = run_distexp(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "newest sweep: multirun_outputs/distexp/a_newer\n"
    assert "completed" in done.stdout


@pytest.mark.parametrize("command", ["status", "report"])
def test_without_a_sweep_the_folder_is_required(command: str, tmp_path: Path) -> None:
    done = run_distexp(command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"distexp: no sweep below multirun_outputs/ in {tmp_path}: give the directory of a sweep\n"


def test_console_script_is_the_same_program(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("distexp")
    done = subprocess.run([script, "strategy=fdsp"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Did you mean fsdp" in done.stderr


def test_a_python_without_the_packages_gets_one_message() -> None:
    """As the Python of the system, for a user who did not activate the environment."""
    result = subprocess.run(
        [sys.executable, "-S", "-m", "distexp", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    start = f"distexp: the package omegaconf is not installed in {sys.executable}: "
    assert result.stderr.startswith(start)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["random", "yaml"])
def test_a_file_that_hides_a_module_is_named_before_the_start(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    command = [sys.executable, "-m", "distexp", "strategy=single"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    start = f"distexp: {tmp_path / name}.py hides the module {name} of Python or of a package: rename yours ("
    assert result.stderr.startswith(start)
    assert result.stderr.count("\n") == 1


def test_a_file_that_hides_a_module_from_the_workers_only_is_named_in_the_record(tmp_path: Path) -> None:
    """The console script does not import from the current folder. The processes of the run do."""
    (tmp_path / "random.py").write_text("x = 1\n")
    script = Path(sys.executable).with_name("distexp")
    command = [script, "strategy=single", "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    error = json.loads((tmp_path / "run" / "record.json").read_text())["error"]
    assert error["message"].endswith(f"{tmp_path / 'random.py'} hides the module random of Python: rename yours")


def test_version_is_that_of_the_package() -> None:
    assert start_distexp("--version").stdout == f"distexp {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_subcommand_prints_its_usage_in_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    try:
        code: object = main([name, "--help"])
    except SystemExit as end:  # argparse
        code = end.code
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert f"distexp {'[run]' if name == 'run' else name}" in printed.out
    assert "usage: distexp " in printed.out
    assert [line for line in printed.out.splitlines() if len(line) > 80] == []


def test_run_is_optional() -> None:
    assert run_distexp("run", "--cfg", "job").stdout == run_distexp("--cfg", "job").stdout


def test_entry_point_does_not_import_hydra() -> None:
    program = "import sys; from distexp.cli.main import main; print('hydra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("added", ["cluster.environment.NCCL_DEBUG=INFO", "cluster.environment={NCCL_DEBUG:INFO,A:1}"])
def test_keys_are_added_to_open_sections_one_by_one_or_together(added: str, tmp_path: Path) -> None:
    done = run_distexp(added, "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "NCCL_DEBUG: INFO" in done.stdout
    assert normalize_arguments(["strategy=ddp", added])[-1] == f"++{added}"


def test_cells_add_keys_to_open_sections(tmp_path: Path) -> None:
    cells = [[f"cluster.environment.{name}=1"] for name in ("FIRST", "SECOND")] + [["cluster.environment={THIRD:1}"]]
    invalid = "train.micro_batch_size=0"  # so no run starts
    run_distexp("--multirun", f"sweep.cells={json.dumps(cells)}", invalid, "hydra.sweep.dir=out", cwd=tmp_path)
    records = [RunRecord.read(tmp_path / f"out/{number}/record.json") for number in range(3)]
    assert [list(record.config["cluster"]["environment"]) for record in records] == [["FIRST"], ["SECOND"], ["THIRD"]]


FURTHER_ERRORS: list[tuple[list[str], list[str]]] = [  # command lines, with the starts of their messages
    (["train.sed=1", "trane.seed=2"], ["trane.seed is not a key", "train.sed is not a key"]),
    (["strategy=fsdpp", "sharding=ful"], ["sharding=ful is not an option", "strategy=fsdpp is not an option"]),
    (["train.foo.bar=1", "train.seed=x"], ["train.foo is not a key", "train.seed=x must be"]),
    (["--multirun", "strategy=ddp,fsdq", "train.sed=1,2"], ["train.sed is not a key", "strategy=fsdq is not an"]),
    (["train.max_steps=-1", "strategy=ddp", "offload=true"], ["train.max_steps=-1 must", "offload=true is not"]),
    (["train.resume=/nowhere", "train.max_steps=0"], ["train.max_steps=0 must", "train.resume=/nowhere contains"]),
]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        *(pytest.param(*case, marks=pytest.mark.release) for case in FURTHER_ERRORS),
        (["--multirun", "zero_stage=1,2", "train.seed=x", "train.sed=1"], ["train.seed=x must be", "train.sed is not"]),
        (
            ["strategy=ddpp", "offload=maybe", "train.seed=x", "train.max_steps=-1", "fsdp.sharding=half"],
            [
                "offload=maybe is not",
                "strategy=ddpp is not",
                "train.seed=x must",
                "fsdp.sharding=half is not",
                "train.max_steps=-1 must",
            ],
        ),
        (
            ["dataset=squad", "dataset.train_path=/no.json", "dataset.eval_path=/no", "train.sed=1"],
            ["train.sed is not a key", "dataset.train_path=/no.json is not a file", "dataset.eval_path=/no is not"],
        ),
    ],
)
def test_every_wrong_override_is_named(
    arguments: list[str], messages: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["distexp"])
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(f"distexp: {message}") for line, message in zip(lines, messages, strict=True)), lines


def test_the_product_of_ranges_is_limited() -> None:
    with pytest.raises(
        ConfigError, match=r"^train.seed=range\(0,1000\) train.epochs=range\(1,1000\) makes 999,000 cells"
    ):
        check_cell_count(parse(["train.seed=range(0,1000)", "train.epochs=range(1,1000)"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["hydra.job.env_copy=[NOPE_X]"],
            "hydra.job.env_copy contains NOPE_X, but there is no such environment variable",
        ),
        (["--shell-completion"], "--shell-completion needs install=bash, install=zsh or install=fish"),
        (["train={a: " + "{a: " * 3000 + "1" + "}" * 3001], "the configuration is nested too deeply"),
        (["--config-dir", "FOLDER", "experiment=deep"], "experiment/deep.yaml is nested too deeply"),
        (
            ["--config-dir", "FOLDER", "experiment=typed"],
            "experiment/typed.yaml has a value that cannot be read (invalid",
        ),
        ([f"train.seed={'1' * 5000}"], "train.seed=11111111111111111111111111111... has a number with too many digits"),
        (["--shell-completion", "install=csh"], "--shell-completion needs install=bash, install=zsh or install=fish"),
        (["-m", "train.seed=range(0,1,0)"], "has no end: use finite numbers and a step other than 0, as in range(0,10"),
        (["-m", "train.seed=range(0,nan)"], "train.seed=range(0,nan) has no end: use finite numbers"),
        (["-m", "train.seed=interval(0,1)"], "is for other sweepers: list the values, or use range(START,STOP,STEP)"),
        pytest.param(
            ["-m", "train.seed=range(0,1000)", "train.max_steps=range(1,1000)"],
            "train.seed=range(0,1000) train.max_steps=range(1,1000) makes 999,000 cells",
            marks=pytest.mark.release,
        ),
        (["-m", "train.seed=range(0,100000000)"], "makes 100,000,000 cells: start a sweep with at most 100,000 cells"),
        (
            ['sweep.cells=[["train.seed=range(0,60000)"],["train.seed=range(0,70000)"]]'],
            "the sweep has 130,000 cells: start one with 1 to 100,000 cells",
        ),
        (["choose", 'choose.space=["dataset.num_workers=range(0,10000000)"]'], "makes 10,000,000 cells"),
        (
            [
                *("choose", "model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", "train.global_batch_size=8"),
                'choose.space=["dataset.num_workers=range(0,10)","train.loss_chunk_tokens=range(1,11)"]',
            ],
            "choose.space makes more than 90 candidates: name fewer values",
        ),
        (
            ["--config-dir", "FOLDER", "experiment=long"],
            "long.yaml has a number of 5,002 digits, 0xfffff",
        ),
        (["--config-dir", "FOLDER", "experiment=many"], "values with its aliases, more than 100,000: use fewer"),
    ],
)
def test_strange_configurations_end_with_a_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "deep.yaml").write_text("# @package _global_\nextra: " + "{a: " * 5000 + "1" + "}" * 5000 + "\n")
    (folder / "typed.yaml").write_text("# @package _global_\ntrain: {seed: !!int abc}\n")
    (folder / "long.yaml").write_text(f"# @package _global_\nmodel: {{options: [0x{'f' * 5000}]}}\n")
    lists = [f"  l{n}: &l{n} [{','.join([f'*l{n - 1}' if n else '1'] * 10)}]" for n in range(7)]
    (folder / "many.yaml").write_text("\n".join(["# @package _global_", "extra:", *lists]))
    monkeypatch.setattr(sys, "argv", ["distexp"])
    monkeypatch.setattr("distexp.choose.space.MAX_CELLS", 90)  # 100,000 candidates take minutes.
    assert main([argument.replace("FOLDER", str(tmp_path)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
