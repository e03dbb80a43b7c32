mkdir -p /etc/permafrost
ip addr add 10.0.0.1/32 dev lo
permafrost pki init --dir ca
permafrost pki issue --dir ca --name n1 --role node --out /etc/permafrost/n1
