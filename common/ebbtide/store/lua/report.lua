-- ARGV: term, role ('' for the coordinator), fence, then kind, key, message, values, labels of each event. Appends events.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
for i = 4, #ARGV, 5 do emit(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]) end
return 1
