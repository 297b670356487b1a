"""Pages that belong to no single app: overview, login, live updates."""
