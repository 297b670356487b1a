"""Training jobs, their replicas, where these run, and what each step cost."""
