"""Hosts of durable objects on Ray, and the face of Mainspring to applications."""
