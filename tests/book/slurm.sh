# getaddrinfo takes no address where there are loopback addresses only.
ip addr add 192.0.2.1/32 dev lo
start-slurm >slurm.log 2>&1 &
systemctl start permafrostd
cat >simulate <<'END'
#!/bin/bash
for i in $(seq 1000000); do echo "step $i"; sleep 0.05; done
END
printf '#!/bin/bash\necho urgent\n' >urgent
chmod +x simulate urgent
until sinfo --noheader --format=%T | grep -q idle; do sleep 0.2; done
check() { grep urgent slurm-*.out && scancel "$JOB"; }
