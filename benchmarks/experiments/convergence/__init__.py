"""Experiment 3: does it hurt the model that the number of workers changes?

plan        which jobs, and at which step each world of an elastic one is to begin; what workers and driver tell each other
resnet20    the model-zoo module that they train
course      one job from its submission to its end
curves      numbers and tables from what the jobs recorded; pure
"""
