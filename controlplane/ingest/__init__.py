"""The agents' and runtimes' door: enrolment, beats, reports, events. The hot path."""
