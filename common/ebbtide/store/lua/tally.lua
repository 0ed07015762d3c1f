-- ARGV: term, then name, value of each observation. Counts what no other script observes.
local bad = barred(ARGV[1]); if bad then return bad end
for at = 2, #ARGV, 2 do observe(ARGV[at], tonumber(ARGV[at + 1])) end
settle()
return 1
