"""An inference service of one Deployment, one GPU a replica, and the load on it.

server      one replica: a SavedModel behind HTTP, one request at a time on its GPU
deployment  the Deployment, and the scale of it
demand      how many requests come when, and how many replicas that takes; pure
service     all requests at their time: which replica gets each, and what became of it
outcome     experiment 2 in numbers and tables; pure
"""
