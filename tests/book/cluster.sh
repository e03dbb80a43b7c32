ip addr add 10.0.0.1/32 dev lo
