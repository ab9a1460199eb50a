"""Fleets of boxes: on Ray, in network namespaces, on Kubernetes, behind HAProxy and Caddy."""
