mkdir -p /etc/permafrost
echo '127.0.0.1 n1.example.org' >>/etc/hosts
permafrost pki init --dir ca
permafrost pki issue --dir ca --name n1 --role node --host n1.example.org --out n1
cp ca/ca.pem .
permafrost token new --name me --scopes read --add-to tokens >token
cat >/etc/permafrost/permafrostd.toml <<END
identity = "$PWD/n1"
listen-api = "127.0.0.1:7119"
api-tokens = "$PWD/tokens"
END
systemctl start permafrostd
