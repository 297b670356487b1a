"""Frameworks with Drydock under them: a replica group under their own trainer (`huggingface`,
`lightning`), and an engine that a whole job saves (`deepspeed`).

Each module needs its framework, which Drydock itself never does; import the one that you use.
"""
