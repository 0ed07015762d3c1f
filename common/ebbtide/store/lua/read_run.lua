-- ARGV: the roles. Returns {record, counters, age in ms, holder or '' per role}, or false if there is no run.
local run = redis.call('HGETALL', RUN)
if #run == 0 then return false end
local age = now_ms() - tonumber(redis.call('HGET', RUN, 'created'))
local holders = {}
for i = 1, #ARGV do holders[i] = redis.call('GET', CLAIM .. ARGV[i]) or '' end
return {run, redis.call('HGETALL', COUNT), age, holders}
