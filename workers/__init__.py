"""What acts: the engine, the guards, the playbooks, and the decisions they follow.

The only code that changes the world outside the database.
"""
