cd /workspace/relay
git merge queue || true
cat > settings.json <<'EOF'
{
  "name": "relay",
  "port": 9090,
  "timeout_s": 60,
  "retries": 5,
  "log": "info",
  "tls": true,
  "queue": "fast"
}
EOF
git add settings.json
git commit -qm 'Merge branch queue'
git log --oneline --graph
