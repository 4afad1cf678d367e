# Sourced by the batch scripts: what every job of a run does before, around and after its step. The variables that
# begin with DRAFTSMITH_ are set by slurm.submit.
#
# A job that fails, or saves and leaves when it is asked to, is requeued by itself and goes on where it was, as long as
# something was added to its output since it was last requeued; without that, DRAFTSMITH_REQUEUES times. Exit code 2 is
# a refusal with a reason that no second try removes.

job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
trap : USR1 TERM

for module in ${DRAFTSMITH_MODULES:-}; do
    module load "$module"
done

in_step=()      # options of srun
in_container=() # what comes before the command
folders=$PWD,$DRAFTSMITH_RUN${DRAFTSMITH_MOUNTS:+,$DRAFTSMITH_MOUNTS}
case ${DRAFTSMITH_CONTAINER:-none} in
    pyxis)
        in_step=(--container-image="$DRAFTSMITH_IMAGE" --container-workdir="$PWD" --container-mounts="$folders")
        ;;
    apptainer)
        in_container=(apptainer exec --pwd "$PWD" --bind "$folders")
        [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || in_container+=(--nv)
        in_container+=("$DRAFTSMITH_IMAGE")
        ;;
esac

# step [options of srun] command: run it on all its tasks, hand USR1 on to every one of them, and wait for all.
# This shell outlives the signals, to see how the tasks end. TERM is not handed on: Slurm sends it to the tasks itself,
# and srun would kill them for it. The tasks of a node share all its CPUs: whether srun takes the CPUs per task from the
# job, which has one task a node, differs by version, and so the number is kept from it.
step() {
    env --unset=SLURM_CPUS_PER_TASK --unset=SLURM_TRES_PER_TASK srun --cpu-bind=none "${in_step[@]}" "$@" &
    local srun=$!
    trap 'echo "job $job: asked to stop"; kill -USR1 "$srun" || true' USR1
    while kill -0 "$srun" 2>/dev/null; do
        wait "$srun" || true # a signal ends the waiting, too
    done
    status=0
    wait "$srun" || status=$?
    trap : USR1
}

# What there is of the output so far, as one line that changes with it.
mark() {
    { compgen -G "$DRAFTSMITH_PROGRESS" || true; } | sort | xargs -r -d '\n' stat --format='%n %s' | cksum
}

# Slurm's word for this job. One that was cancelled, ran out of time or is requeued by Slurm is RUNNING no more.
state() {
    local found='' try
    for try in 1 2 3 4 5; do
        found=$(squeue --noheader --jobs="$job" --format=%T) && break
        sleep "$try"
    done
    echo "$found"
}

# leave STATUS: end the job, or requeue it.
leave() {
    local status=$1 count=0 before='' now record=$DRAFTSMITH_RUN/slurm/$DRAFTSMITH_STAGE-$job.requeues
    if [[ $status == 0 || $status == 2 || -z ${DRAFTSMITH_PROGRESS:-} || $(state) != RUNNING ]]; then
        exit "$status"
    fi
    now=$(mark)
    [[ ! -f $record ]] || read -r count before <"$record"
    [[ $now == "$before" ]] || count=0
    if ((count >= DRAFTSMITH_REQUEUES)); then
        echo "job $job: exit code $status, given up after $count requeues without progress" >&2
        exit "$status"
    fi
    echo "$((count + 1)) $now" >"$record"
    echo "job $job: exit code $status, requeued to go on"
    scontrol requeue "$job"
    exit "$status"
}
