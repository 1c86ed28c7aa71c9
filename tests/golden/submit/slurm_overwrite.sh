#!/bin/bash

#SBATCH --job-name=job
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120

export PYTHONUNBUFFERED=1
# By it the ranks know each other; srun hands it to them.
HVDTRAIN_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n') || exit
export HVDTRAIN_SECRET

rank=(hvdtrain fit job.toml)
if (( ${SLURM_RESTART_COUNT:-0} > 0 )); then
    rank+=(--resume)
else
    rank+=(--overwrite)
fi

# The ranks get the signals as well; this script has to outlive them.
trap : TERM USR1
# 30 s after the first rank has ended, srun ends the others.
# In the background, since bash answers signals only between commands.
srun --mpi=none --label --kill-on-bad-exit=0 --wait=30 "${rank[@]}" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?

# 75: the ranks were told to stop, have saved and left.
if (( code == 75 )); then
    # One that was cancelled is not RUNNING any more, and must not come back.
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
    if [[ $state != RUNNING ]]; then
        echo "The job is ${state:-gone}: it is not requeued." >&2
    elif (( ${SLURM_RESTART_COUNT:-0} >= 50 )); then
        echo "The job was requeued 50 times: no more (--max-requeues)." >&2
    else
        # Requeueing ends this script with SIGTERM.
        trap 'exit $code' TERM
        if scontrol requeue "$SLURM_JOB_ID"; then
            sleep 60 &
            wait "$!"
        fi
        echo "The job could not be requeued. Submit it again, with --resume." >&2
    fi
fi
exit $code
