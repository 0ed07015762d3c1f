-- ARGV: term, role, fence, version, packed record, step. Makes a version the newest. Returns 1, or 0 for a repeat.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local known = redis.call('HGET', VERSIONS, ARGV[4])
if known then
  if known ~= ARGV[5] then return refuse('TAKEN') end
  return 0
end
if tonumber(ARGV[4]) > tonumber(redis.call('HGET', RUN, 'version')) then return refuse('UNRESERVED') end
local newest = tonumber(redis.call('HGET', RUN, 'newest') or 0)
if tonumber(ARGV[4]) < newest then return refuse('OLD', tostring(newest)) end
redis.call('HSET', VERSIONS, ARGV[4], ARGV[5])
redis.call('HSET', RUN, 'newest', ARGV[4], 'newest_record', ARGV[5])
emit('version', ARGV[4], 'version ' .. ARGV[4], cjson.encode({version = tonumber(ARGV[4]), step = tonumber(ARGV[6])}), '{}')
return 1
