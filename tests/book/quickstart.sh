# As the package leaves it.
mkdir -p /etc/permafrost
install -m 600 /dev/null /etc/permafrost/api-tokens
cat >/etc/permafrost/permafrostd.toml <<END
listen-api = "127.0.0.1:7119"
api-tokens = "/etc/permafrost/api-tokens"
END
check() {
    permafrost ls | grep -q 'naps@2'
    curl --silent --fail http://127.0.0.1:7119/ui | grep -q '<html'
}
