"""What a node costs on a cluster: seconds, and bytes that live."""
