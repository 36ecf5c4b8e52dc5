"""Learned scores for a pretrained model: training by distillation, and what a budget of keys costs."""
