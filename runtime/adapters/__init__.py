"""The replica group under a framework's own trainer: `huggingface`, `lightning`.

Each module imports its framework, which Drydock itself never needs; import the one that you use.
"""
