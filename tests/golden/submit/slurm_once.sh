#!/bin/bash

#SBATCH --job-name=job
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --no-requeue

export PYTHONUNBUFFERED=1
# By it the ranks know each other; srun hands it to them.
HVDTRAIN_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n') || exit
export HVDTRAIN_SECRET

rank=(hvdtrain fit job.toml --epochs 3)

# The ranks get the signals as well; this script has to outlive them.
trap : TERM USR1
# In the background, since bash answers signals only between commands.
srun --mpi=none --label --kill-on-bad-exit=0 --wait=0 "${rank[@]}" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?

exit $code
