# Sourced by the batch scripts: what every job of a run does before, around and after its step. The variables that
# begin with DRAFTSMITH_ are set by slurm.submit.
#
# A job that fails, or saves and leaves when it is asked to, is requeued by itself and goes on where it was, as long as
# something was added to its output since it was last requeued; without that, DRAFTSMITH_REQUEUES times. Exit code 2 is
# a refusal with a reason that no second try removes.

job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
trap : USR1 TERM

if [[ -n ${DRAFTSMITH_TASKS:-} ]]; then # what this task of the array is told (slurm/tasks.py), in place of our words
    mapfile -t words <"$DRAFTSMITH_TASKS/$SLURM_ARRAY_TASK_ID"
    DRAFTSMITH_PROGRESS=${words[0]}
    set -- "${words[@]:1}"
fi

for module in ${DRAFTSMITH_MODULES:-}; do
    module load "$module"
done

in_step=()      # options of srun
in_container=() # what comes before the command
folders=$PWD,$DRAFTSMITH_RUN${DRAFTSMITH_SPOOL:+,$DRAFTSMITH_SPOOL}${DRAFTSMITH_MOUNTS:+,$DRAFTSMITH_MOUNTS}
[[ -z ${DRAFTSMITH_SPOOL:-} ]] || mkdir -p "$DRAFTSMITH_SPOOL" # a container takes in only what is there
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

# launch [options of srun] command: become srun. The tasks of a node share all its CPUs: whether srun takes the CPUs per
# task from the job, which has one task a node, differs by version, and so the number is kept from it.
launch() {
    local kept=(--unset=SLURM_{CPUS,TRES}_PER_TASK{,_HET_GROUP_0,_PACK_GROUP_0})
    exec env "${kept[@]}" srun --cpu-bind=none "${in_step[@]}" "$@"
}

# step [options of srun] command: run it on all its tasks, hand USR1 on to every one of them, and wait for all. What has
# not left when three quarters of the time until the limit are over is killed, so that the job can still be requeued.
# This shell outlives the signals, to see how the tasks end. TERM is not handed on: Slurm sends it to the tasks itself,
# and srun would kill them for it.
step() {
    launch "$@" &
    local srun=$! timer=''
    trap 'ask' USR1
    while kill -0 "$srun" 2>/dev/null; do
        wait "$srun" || true # a signal ends the waiting, too
    done
    status=0
    wait "$srun" || status=$?
    trap : USR1
    [[ -z $timer ]] || kill "$timer" 2>/dev/null || true
}
ask() {
    echo "job $job: asked to stop"
    kill -USR1 "$srun" 2>/dev/null || true
    [[ -z $timer ]] || return 0
    (
        trap 'kill "$!"; exit 0' TERM
        sleep $((${DRAFTSMITH_SIGNAL:-120} * 3 / 4)) &
        wait "$!"
        echo "job $job: it does not stop, and is killed"
        kill "$srun"
    ) &
    timer=$!
}

# beside GROUP command: run it as a task on the nodes of another group of a heterogeneous job until this shell is sent
# TERM; again when it has ended well, since it may have found nothing to do too early. When it fails, the script finds
# its exit code in $failed, and is asked to stop, as before its time limit, until it has.
failed=$DRAFTSMITH_RUN/slurm/$DRAFTSMITH_STAGE-$job.failed
beside() {
    local group=$1 cpus=SLURM_CPUS_PER_TASK_HET_GROUP_$1 log=$DRAFTSMITH_RUN/slurm/$DRAFTSMITH_BESIDE-${job}_$1.log
    local child='' code=0
    shift
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${!cpus:-1}}
    trap 'kill "$child" 2>/dev/null && wait "$child"; exit 0' TERM
    trap '' USR1
    while ((code == 0)); do
        [[ -z $child ]] || pause 10
        launch --het-group="$group" --nodes=1 --ntasks=1 "$@" >>"$log" 2>&1 &
        child=$!
        wait "$child" || code=$?
    done
    echo "$code" >>"$failed" || true # on a full disk training is stopped all the same
    echo "job $job: $DRAFTSMITH_BESIDE ended with exit code $code (log: $log): $(tail -n 1 "$log")"
    while kill -USR1 $$; do
        pause 20 # longer than it takes to begin: what has no handler yet is ended by the signal
    done
}
pause() {
    sleep "$1" &
    child=$!
    wait "$child"
}

# What there is of the output so far, as one line that changes with it. A file may vanish while it is looked at.
mark() {
    { compgen -G "$DRAFTSMITH_PROGRESS" | sort | xargs -r -d '\n' stat --format='%n %s' || true; } 2>/dev/null | cksum
}

# insist command: until it succeeds, for ten minutes: Slurm's controller may be starting again.
insist() {
    local try
    for ((try = 1; try < 20; try++)); do
        "$@" && return
        sleep $((3 * try))
    done
    "$@"
}

# Slurm's word for this job. One that was cancelled, ran out of time or is requeued by Slurm is RUNNING no more.
state() {
    local found
    found=$(insist squeue --noheader --jobs="$job" --format=%T) || true
    echo "${found%%$'\n'*}" # a heterogeneous job has a line for each of its parts
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
    insist scontrol requeue "$job" || true
    exit "$status"
}
