"""Experiment 3: does it hurt the model that the number of workers changes?

plan        which jobs, and at which step each world of an elastic one is to begin; pure
settings    what a job's workers are told, in a file
resnet20    the model-zoo module that they train
exact       gradients whose sum does not depend on the order
hold        holding all workers at a step until the driver has seen the change of workers announced
course      one job from its submission to its end
curves      numbers from what the jobs recorded; pure
plot        the figure
"""
