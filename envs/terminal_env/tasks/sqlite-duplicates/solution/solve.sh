cd /workspace
sqlite3 shop.db <<'EOF'
BEGIN;
UPDATE purchase SET customer_id = (
  SELECT min(k.id) FROM customer k JOIN customer c ON lower(trim(k.email)) = lower(trim(c.email))
  WHERE c.id = purchase.customer_id);
DELETE FROM customer WHERE id NOT IN (SELECT min(id) FROM customer GROUP BY lower(trim(email)));
UPDATE customer SET email = lower(trim(email));
CREATE UNIQUE INDEX customer_email ON customer (email);
COMMIT;
EOF
sqlite3 shop.db 'SELECT c.email, count(*), sum(p.cents) FROM customer c JOIN purchase p ON p.customer_id = c.id GROUP BY c.id'
