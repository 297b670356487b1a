"""The whole product on one machine: embedded services, a demo fleet, and its scenarios."""
