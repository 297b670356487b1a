"""Users, their roles per cluster, and the audit trail."""
