"""Jobs for schedulers: Slurm batch scripts and Kubernetes manifests, as text; sbatch."""
