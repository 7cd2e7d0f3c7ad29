"""Optional features of a schedule, each in a module or folder that alone knows the feature."""
