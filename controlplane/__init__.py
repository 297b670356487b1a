"""The record of what is true: a Django project that decides nothing disruptive by itself."""
