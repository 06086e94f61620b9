"""Sockets of servers, clients, coordinators and workers: listeners and connections."""
