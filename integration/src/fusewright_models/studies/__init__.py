"""Trainings that answer one question each, their result files and pictures."""
