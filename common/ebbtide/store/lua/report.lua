-- ARGV: term, role ('' for the coordinator), fence, quota in bytes ('' for the coordinator), then kind, key, message, values, labels of
-- each event. Appends events: all or nothing. Those of kind 'rewards' are also added to the run's counters.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
if ARGV[4] ~= '' then
  local facts = tonumber(redis.call('HGET', RUN, 'facts') or 0)  -- of the others, old ones go
  for i = 5, #ARGV, 5 do
    if FACTS[ARGV[i]] then facts = facts + event_bytes(ARGV, i) end
  end
  if facts > tonumber(ARGV[4]) then return refuse('QUOTA', tostring(facts)) end
end
for i = 5, #ARGV, 5 do
  if emit(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]) and ARGV[i] == 'rewards' then
    local values = cjson.decode(ARGV[i + 3])
    for _, name in ipairs({'scored', 'out_of_time', 'explored'}) do
      local number = tonumber(values[name]) or 0  -- a program of the user's may report anything
      if number >= 1 and number < 2 ^ 31 then count('rewards_' .. name, math.floor(number)) end
    end
  end
end
settle()
return 1
