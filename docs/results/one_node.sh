#!/usr/bin/env bash
# Make the tables of the exercises that need one node. Rows of 1, 2, 4 and 8 GPUs are comparable only on one machine.
# A row that needs more GPUs than the machine has shows this reason in its table.
#
#   docs/results/one_node.sh RESULTS dataset.train_path=train-v1.1.json dataset.eval_path=dev-v1.1.json \
#                                    dataset.root=tiny-imagenet-200
#   docs/results/one_node.sh RESULTS scale=tiny scale.workers=8        # without GPUs and data, to see that it works
#   EXERCISES="fsdp/multi_gpu fsdp/sharding" docs/results/one_node.sh RESULTS ...     # some of them
#
# Existing results are kept. After an interruption, run the same command again.
set -uo pipefail
results=${1:?usage: one_node.sh RESULTS [KEY=VALUE ...]}
shift

: "${EXERCISES:=preflight ddp/multi_gpu deepspeed/zero_offload_single_gpu deepspeed/two_gpu_stages \
deepspeed/multi_gpu_weak_scaling fsdp/multi_gpu fsdp/sharding fsdp/sharding_2x4 fsdp/custom_multi_gpu \
fsdp/custom_weak_scaling}"
: "${PYTHON:=python}"

images() { [[ $1 == dataset.root=* ]]; }
text() { [[ $1 == dataset.train_path=* || $1 == dataset.eval_path=* ]]; }

# Print the overrides that an exercise accepts: each has one dataset and refuses the keys of the other.
overrides_for() {
    local exercise=$1 override
    shift
    for override in "$@"; do
        case $exercise in
            preflight) [[ $override == *.device=* ]] && printf '%s\n' "$override" ;;
            ddp/*) text "$override" || printf '%s\n' "$override" ;;
            *) images "$override" || printf '%s\n' "$override" ;;
        esac
    done
}

failed=0
for exercise in $EXERCISES; do
    sweep=$results/${exercise//\//_}
    mapfile -t overrides < <(overrides_for "$exercise" "$@")
    echo "=== $exercise"
    case $exercise in
        preflight)
            mkdir -p "$results"
            "$PYTHON" -m distexp.preflight "${overrides[@]}" | tee "$sweep.txt" || failed=1
            continue
            ;;
        # Hybrid sharding as two simulated nodes of four, of which only the sharding within a node is on one machine.
        fsdp/sharding_2x4) overrides+=(experiment=fsdp/sharding sharding=hybrid_shard offload=false cluster.workers_per_node=4) ;;
        *) overrides+=("experiment=$exercise") ;;
    esac
    if [[ -e $sweep ]]; then
        "$PYTHON" -m distexp.resume "$sweep" || failed=1
    else
        mkdir -p "$results"
        "$PYTHON" -m distexp "${overrides[@]}" "hydra.sweep.dir=$sweep" || failed=1
    fi
    "$PYTHON" -m distexp.report "$sweep" || failed=1
done
exit "$failed"
