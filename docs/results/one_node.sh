#!/usr/bin/env bash
# The tables of the exercises that need one node, all from this machine: rows of 1, 2, 4 and 8 GPUs are comparable only
# where they are. A row that wants more GPUs than there are says so in its table.
#
#   docs/results/one_node.sh RESULTS dataset.train_path=train-v1.1.json dataset.eval_path=dev-v1.1.json \
#                                    dataset.root=tiny-imagenet-200
#   docs/results/one_node.sh RESULTS scale=tiny scale.workers=8        # without GPUs and data, to see that it works
#   EXERCISES="fsdp/multi_gpu fsdp/sharding" docs/results/one_node.sh RESULTS ...     # some of them
#
# What is there already is kept: after an interruption, the same command does what is missing.
set -uo pipefail
results=${1:?usage: one_node.sh RESULTS [KEY=VALUE ...]}
shift

: "${EXERCISES:=preflight ddp/multi_gpu deepspeed/zero_offload_single_gpu deepspeed/two_gpu_stages \
deepspeed/multi_gpu_weak_scaling fsdp/multi_gpu fsdp/sharding fsdp/sharding_2x4 fsdp/custom_multi_gpu \
fsdp/custom_weak_scaling}"
: "${PYTHON:=python}"

images() { [[ $1 == dataset.root=* ]]; }
text() { [[ $1 == dataset.train_path=* || $1 == dataset.eval_path=* ]]; }

# Each exercise has one data set, and would refuse the keys of the other.
words_for() {
    local exercise=$1 word
    shift
    for word in "$@"; do
        case $exercise in
            preflight) [[ $word == *.device=* ]] && printf '%s\n' "$word" ;;
            ddp/*) text "$word" || printf '%s\n' "$word" ;;
            *) images "$word" || printf '%s\n' "$word" ;;
        esac
    done
}

failed=0
for exercise in $EXERCISES; do
    sweep=$results/${exercise//\//_}
    mapfile -t words < <(words_for "$exercise" "$@")
    echo "=== $exercise"
    case $exercise in
        preflight)
            mkdir -p "$results"
            "$PYTHON" -m distexp.preflight "${words[@]}" | tee "$sweep.txt" || failed=1
            continue
            ;;
        # Hybrid sharding as two simulated nodes of four, of which only the sharding within a node is on one machine.
        fsdp/sharding_2x4) words+=(experiment=fsdp/sharding sharding=hybrid_shard offload=false cluster.workers_per_node=4) ;;
        *) words+=("experiment=$exercise") ;;
    esac
    if [[ -e $sweep ]]; then
        "$PYTHON" -m distexp.resume "$sweep" || failed=1
    else
        mkdir -p "$results"
        "$PYTHON" -m distexp "${words[@]}" "hydra.sweep.dir=$sweep" || failed=1
    fi
    "$PYTHON" -m distexp.report "$sweep" || failed=1
done
exit "$failed"
