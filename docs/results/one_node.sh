#!/usr/bin/env bash
# Make the tables of the exercises that need one node. Rows of 1, 2, 4 and 8 GPUs are comparable only on one machine.
# A row that needs more GPUs than the machine has shows this reason in its table.
#
#   docs/results/one_node.sh RESULTS dataset.train_path=train-v1.1.json dataset.eval_path=dev-v1.1.json \
#                                    dataset.root=tiny-imagenet-200
#   docs/results/one_node.sh RESULTS scale=tiny scale.workers=8        # without GPUs and data, to see that it works
#
# Variables:
#   EXERCISES  some of the exercises, in this order: EXERCISES="fsdp/multi_gpu fsdp/sharding"
#   BUDGET_S   seconds for all of them: then the sweep is stopped, and no other one starts
#   OUT        folder of results.tar.gz: the record, losses, memory and step times of each run, after each exercise
#
# Existing results are kept. After an interruption, run the same command again.
#
# A record has the commit of the code, and whether there were changes. New files are changes, so RESULTS must not be in
# the checkout. On a machine without the repository, use a clone of its commits in one file:
#
#   git bundle create distexp.bundle HEAD      # in the repository, with all changes committed
#   git clone distexp.bundle distexp           # on the other machine
set -uo pipefail
results=${1:?usage: one_node.sh RESULTS [KEY=VALUE ...]}
shift

: "${EXERCISES:=preflight fsdp/sharding fsdp/multi_gpu fsdp/sharding_two_gpus fsdp/custom_multi_gpu \
deepspeed/baseline deepspeed/zero_offload_single_gpu deepspeed/pin_memory deepspeed/two_gpu_stages ddp/multi_gpu \
fsdp/sharding_2x4 deepspeed/multi_gpu_weak_scaling fsdp/custom_weak_scaling}"
: "${PYTHON:=python}"
: "${BUDGET_S:=0}"

mkdir -p "$results"
checkout=$(git -C "$(dirname "$0")" rev-parse --show-toplevel 2>/dev/null)
if [[ -z $checkout || -n $(git -C "$checkout" status --porcelain) ]]; then
    echo "warning: the code has uncommitted changes, or no commit: the records cannot be traced to a commit" >&2
fi

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

# Run a command of distexp until the time is over: then it is interrupted, and writes its records. 0: no limit.
run() {
    local left=0
    ((BUDGET_S == 0)) || left=$((BUDGET_S - SECONDS))
    timeout --signal=INT --kill-after=20 "$left" "$PYTHON" -m "$@"
}

# The report needs these files, and not the logs, traces and weights.
pack() {
    [[ -z ${OUT:-} ]] && return
    (cd "$results" && find . \( -name '*.json' -o -name '*.jsonl' -o -name '*.yaml' -o -name '*.csv' -o -name '*.txt' \) \
        -not -name '*trace*' -not -path '*/checkpoints/*' -not -path '*/report/*' -print0 |
        tar --create --gzip --file "$OUT/results.tar.gz" --null --files-from -)
}

failed=0
for exercise in $EXERCISES; do
    ((BUDGET_S == 0 || SECONDS + 10 < BUDGET_S)) || { echo "no time is left for $exercise"; failed=1; continue; }
    sweep=$results/${exercise//\//_}
    mapfile -t overrides < <(overrides_for "$exercise" "$@")
    echo "=== $exercise, after $SECONDS s"
    case $exercise in
        preflight)
            run distexp.preflight "${overrides[@]}" | tee "$sweep.txt" || failed=1
            continue
            ;;
        # Hybrid sharding as two simulated nodes of four, of which only the sharding within a node is on one machine.
        fsdp/sharding_2x4) overrides+=(experiment=fsdp/sharding sharding=hybrid_shard offload=false cluster.workers_per_node=4) ;;
        fsdp/sharding_two_gpus) overrides+=(experiment=fsdp/sharding cluster.nodes=1 cluster.workers_per_node=2 offload=false) ;;
        *) overrides+=("experiment=$exercise") ;;
    esac
    if [[ -e $sweep ]]; then
        run distexp.resume "$sweep" || failed=1
    else
        run distexp "${overrides[@]}" "hydra.sweep.dir=$sweep" || failed=1
    fi
    pack
    # The figures need altair, which training does not need.
    if "$PYTHON" -c 'import altair' 2>/dev/null; then
        "$PYTHON" -m distexp.report "$sweep" || failed=1
    fi
done
exit "$failed"
