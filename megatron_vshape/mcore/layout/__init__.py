"""Which stage is where, and which layers it has."""
