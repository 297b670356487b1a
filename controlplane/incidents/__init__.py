"""Incidents, their timeline, and playbook runs and steps as rows."""
