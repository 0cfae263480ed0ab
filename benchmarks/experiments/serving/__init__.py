"""An inference service of one Deployment, one GPU a replica, and the load on it.

model       the SavedModel that is served
server      one replica: HTTP, one request at a time on its GPU
deployment  the Deployment, and the scale of it
demand      how many requests come when; pure
autoscaler  how many replicas that takes; pure
rotation    which replica gets a request; pure
requests    sending one, and what became of it
load        sends all of them, and has the autoscaler look on
outcome     experiment 2 in numbers; pure
picture     its figure
"""
