"""An inference service of one Deployment, one GPU a replica, and the load on it.

server      one replica: a SavedModel behind HTTP, one request at a time on its GPU
deployment  the Deployment, and the scale of it
demand      how many requests come when, and how many replicas that takes; pure
frontend    which replica gets a request, sending it, and what became of it
service     sends all of them, has the autoscaler look on, and takes down what happens
outcome     experiment 2 in numbers and tables; pure
"""
