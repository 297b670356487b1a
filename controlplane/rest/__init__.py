"""What every REST resource shares: problems, filters, cursors, ETags, idempotency, verbs."""
