mkdir -p /etc/permafrost
ip addr add 10.0.0.1/32 dev lo
permafrost pki init --dir site
permafrost pki issue --dir site --name store --role node --host 10.0.0.1 --out store
permafrost pki issue --dir site --name c1 --role agent --namespace default --out c1
cp c1/*.pem /etc/permafrost/
cat >/etc/permafrost/permafrostd.toml <<END
identity = "$PWD/store"
listen = "10.0.0.1:7117"
END
systemctl start permafrostd
start_process
check() { permafrost ls --parked; }
