"""Measures of segmentation and classification, fairness between hospitals, and paired statistics."""
