"""A whole cluster on one machine: real kubelets, containerd and runc, pods with addresses and limits of their own.

`tests.cluster.full.cluster` is the door; it has the interface of `tests.cluster.cluster`, whose control plane it shares.

    host:     etcd, API server, ... ── elasticdlN ─┐
    switch:   a network namespace with one bridge ─┴── n0 ── n1
    node:     network, mount and process namespaces of its own: containerd, kubelet, kube-proxy, DNS

Whatever the kubelet has to be root for happens in its node's namespaces. They, and the interfaces between them, go with
the last process in them; each is held on a leash (`tests.cluster.leash`). What the kernel keeps nonetheless, control
groups, the leash removes afterwards. Nothing leads out of the switch: a cluster reaches the host and nobody else.

Only the programs of `tests.cluster.build` and the images of `tests.cluster.full.images` are used; nothing is pulled.
"""
