mkdir -p /etc/permafrost
check() { permafrost ls | grep -q 'naps@2'; }
