#!/usr/bin/env bash
# The four stages of a run as four Slurm jobs, each started when the one before it has succeeded:
#
#     slurm/pipeline.sh experiment=demo
#     STAGE_OPTIONS="--gpus-per-node=1" TRAIN_OPTIONS="--nodes=2 --gpus-per-node=8" slurm/pipeline.sh experiment=demo
#
# Prints each stage with its job id; what the jobs say is in runs/<name>/slurm. Account, partition and time limit
# go in STAGE_OPTIONS and TRAIN_OPTIONS, or in Slurm's own SBATCH_* variables. Calling it again continues the
# run: stages that are complete do nothing.
set -euo pipefail
if [[ $# -eq 0 ]]; then
    echo "usage: slurm/pipeline.sh overrides (experiment=demo, say)" >&2
    exit 2
fi
cd "$(dirname "$0")/.."

python=${DRAFTSMITH_PYTHON:-.venv/bin/python}
if [[ ! -x $python ]]; then
    echo "pipeline: no interpreter at $python; run make env there, or set DRAFTSMITH_PYTHON" >&2
    exit 2
fi

# A mistake in the overrides is told here, not by a job that fails in the night.
directory=$("$python" -c '
import sys, conf
from models.errors import Refused
try:
    print(conf.load(sys.argv[1:]).directory.absolute())
except Refused as error:
    print(f"pipeline: {error}", file=sys.stderr)
    sys.exit(2)' "$@")
mkdir -p "$directory/slurm"

previous=
for stage in featurize train models.export serve_eval; do
    options=${STAGE_OPTIONS:-}
    [[ $stage == train ]] && options=${TRAIN_OPTIONS:-$options}
    # shellcheck disable=SC2086
    previous=$(sbatch --parsable ${previous:+--dependency=afterok:$previous} --kill-on-invalid-dep=yes \
        --job-name="$stage" --output="$directory/slurm/%x-%j.out" $options slurm/stage.sbatch "$stage" "$@")
    previous=${previous%%;*}
    echo "$stage $previous"
done
