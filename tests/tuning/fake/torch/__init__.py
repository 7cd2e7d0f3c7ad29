"""Stands where torch would, so that a test's runs start in no time."""
