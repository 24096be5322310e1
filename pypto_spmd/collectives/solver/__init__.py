"""Least-cost labelling over plain tables: exact, and knowing nothing of JAX or shardings."""
