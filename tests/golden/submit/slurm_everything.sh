#!/bin/bash

#SBATCH --job-name='it'"'"'s; $HOME\\'
#SBATCH --nodes=3
#SBATCH --ntasks=5
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=1-12
#SBATCH --partition=gpu
#SBATCH --account='a b'
#SBATCH --qos=long
#SBATCH --constraint='[a100|h100]'
#SBATCH --output='logs dir/%j.txt'
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --exclusive
#SBATCH --mail-type=END

# The function `module` is not there in every batch job.
if ! type module >/dev/null 2>&1; then
    for file in /etc/profile.d/{lmod,modules,z00_lmod}.sh; do
        if [[ -r $file ]]; then source "$file"; fi
    done
fi
module load cuda/12.4 || exit
module load 'gcc; id' || exit
source '/opt/my env/bin/activate' || exit
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
# By it the ranks know each other; srun hands it to them.
HVDTRAIN_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n') || exit
export HVDTRAIN_SECRET
export TEXT=$'two\nlines; $(id)'
: "${SECRET?is not set. Submit the job where it is.}"
export SECRET

rank=('/opt/my env/bin/python' -m hvdtrain fit job.toml --epochs 3)
if (( ${SLURM_RESTART_COUNT:-0} > 0 )); then
    rank+=(--resume)
fi

# The ranks get the signals as well; this script has to outlive them.
trap : TERM USR1
# 90 s after the first rank has ended, srun ends the others.
# In the background, since bash answers signals only between commands.
srun --mpi=none --label --kill-on-bad-exit=0 --wait=90 --cpus-per-task="$SLURM_CPUS_PER_TASK" "${rank[@]}" &
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
    elif (( ${SLURM_RESTART_COUNT:-0} >= 7 )); then
        echo "The job was requeued 7 times: no more (--max-requeues)." >&2
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
