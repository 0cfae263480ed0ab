"""An inference service of one Deployment, one GPU a replica, and the load on it.

server      one replica: a model behind HTTP, one request at a time on its GPU
demand      how many requests come when, and how many replicas that takes; pure
service     all requests at their time: which replica gets each, and what became of it; the Deployment, and its scale
outcome     experiment 2 in numbers and tables; pure
"""
