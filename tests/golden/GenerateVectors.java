import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HexFormat;
import java.util.List;
import java.util.Random;
import java.util.stream.Collectors;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.DefaultRecord;
import org.apache.kafka.common.record.internal.EndTransactionMarker;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.record.internal.SimpleRecord;
import org.apache.kafka.common.utils.Utils;

/** Writes what the Java client's own classes make of fixed input, as JSON: record_batches.json, records.json, murmur2.json. */
public class GenerateVectors {
    static final Header[] NONE = new Header[0];
    static final int[] PARTITION_COUNTS = {1, 2, 3, 7, 12, 200, 1000};

    public static void main(String[] args) throws Exception {
        Path folder = Path.of(args[0]);
        write(folder.resolve("record_batches.json"), batches());
        write(folder.resolve("records.json"), records());
        write(folder.resolve("murmur2.json"), hashes());
    }

    // ---- whole batches

    static List<String> batches() {
        List<SimpleRecord> plain = List.of(
            record(1_700_000_000_000L, "k1", "v1"), record(1_700_000_000_005L, "k2", "v2"), record(1_700_000_000_001L, null, "v3"));
        List<SimpleRecord> mixed = List.of(
            record(1_700_000_000_000L, null, null),
            record(1_700_000_000_000L, "", ""),
            record(1_700_000_000_000L, "key", null),
            record(1_700_000_000_000L, null, "value"));
        List<SimpleRecord> headers = List.of(
            new SimpleRecord(5L, utf8("k"), utf8("v"), new Header[] {
                new RecordHeader("trace", utf8("0123456789abcdef")), new RecordHeader("nothing", (byte[]) null),
                new RecordHeader("", new byte[0]), new RecordHeader("größe", new byte[] {0, (byte) 0xff}),
                new RecordHeader("trace", utf8("again"))}),
            new SimpleRecord(6L, null, utf8("no headers")),
            new SimpleRecord(7L, (byte[]) null, null, new Header[] {new RecordHeader("only", new byte[200])}));
        List<SimpleRecord> times = List.of(
            record(1_700_000_000_000L, "a", "1"), record(1_699_999_999_937L, "a", "2"), record(0L, "a", "3"),
            record(-1L, "a", "4"), record(1_700_000_008_192L, "a", "5"), record(Long.MAX_VALUE, "a", "6"));
        List<SimpleRecord> sizes = new ArrayList<>();
        for (int size : new int[] {0, 1, 50, 56, 57, 58, 62, 63, 64, 65, 8191, 8192})
            sizes.add(new SimpleRecord(9L, size % 3 == 0 ? null : filled(Math.min(size, 70), 0x6b), filled(size, 0x76)));
        List<SimpleRecord> many = new ArrayList<>();
        for (int i = 0; i < 100; i++)
            many.add(record(1_000L + i, "key-" + i % 7, "value-" + i));
        long noId = RecordBatch.NO_PRODUCER_ID;
        short noEpoch = RecordBatch.NO_PRODUCER_EPOCH;
        int noSequence = RecordBatch.NO_SEQUENCE;
        List<String> all = new ArrayList<>();
        all.add(batch("plain", "none", noId, noEpoch, noSequence, false, plain));
        all.add(batch("nulls and empties", "none", noId, noEpoch, noSequence, false, mixed));
        all.add(batch("headers", "none", noId, noEpoch, noSequence, false, headers));
        all.add(batch("timestamps forth and back", "none", noId, noEpoch, noSequence, false, times));
        all.add(batch("sizes around a longer varint", "none", noId, noEpoch, noSequence, false, sizes));
        all.add(batch("many records", "none", noId, noEpoch, noSequence, false, many));
        all.add(batch("idempotent", "none", 4711L, (short) 3, 2_147_483_646, false, plain));
        all.add(batch("transactional", "none", Long.MAX_VALUE, Short.MAX_VALUE, 0, true, plain));
        for (String codec : new String[] {"gzip", "snappy", "lz4", "zstd"}) {
            all.add(batch("plain", codec, noId, noEpoch, noSequence, false, plain));
            all.add(batch("many records", codec, 4711L, (short) 3, 17, true, many));
        }
        all.add(readOnly("log append time", logAppendTime(plain), plain));
        all.add(readOnly("control", MemoryRecords.withEndTransactionMarker(1_700_000_000_000L, 77L, (short) 5,
            new EndTransactionMarker(ControlRecordType.COMMIT, 9)), List.of()));
        return all;
    }

    /** A batch as only a broker writes it: to be read, not to be made. */
    static String readOnly(String name, MemoryRecords made, List<SimpleRecord> rows) {
        String described = rows.stream().map(GenerateVectors::described).collect(Collectors.joining(",\n   "));
        return String.format("{\"name\": \"%s\", \"codec\": null,\n  \"records\": [%s],\n  \"batch\": \"%s\"}", name, described,
            hex(made.buffer()));
    }

    static MemoryRecords logAppendTime(List<SimpleRecord> rows) {
        MemoryRecordsBuilder builder = MemoryRecords.builder(ByteBuffer.allocate(1 << 16), RecordBatch.MAGIC_VALUE_V2,
            Compression.NONE, TimestampType.LOG_APPEND_TIME, 5_000_000_000L, 1_800_000_000_000L);
        rows.forEach(builder::append);
        return builder.build();
    }

    static String batch(String name, String codec, long id, short epoch, int sequence, boolean transactional, List<SimpleRecord> rows) {
        MemoryRecordsBuilder builder = MemoryRecords.builder(ByteBuffer.allocate(1 << 16), RecordBatch.MAGIC_VALUE_V2,
            Compression.of(codec).build(), TimestampType.CREATE_TIME, 0L, RecordBatch.NO_TIMESTAMP, id, epoch, sequence, transactional,
            RecordBatch.NO_PARTITION_LEADER_EPOCH);
        rows.forEach(builder::append);
        String described = rows.stream().map(GenerateVectors::described).collect(Collectors.joining(",\n   "));
        return String.format("{\"name\": \"%s\", \"codec\": \"%s\", \"producer_id\": %d, \"producer_epoch\": %d, \"base_sequence\": %d, "
            + "\"is_transactional\": %b,\n  \"records\": [%s],\n  \"batch\": \"%s\"}",
            name, codec, id, epoch, sequence, transactional, described, hex(builder.build().buffer()));
    }

    // ---- single records, with deltas that no builder would let through

    static List<String> records() throws Exception {
        List<String> all = new ArrayList<>();
        long[] times = {0, 1, -1, 63, -64, 64, -65, 8191, 8192, -8192, -8193, 1L << 31, -(1L << 31), 1L << 34, 1L << 48, 1L << 55,
            (1L << 55) - 1, -(1L << 55), 1L << 62, Long.MAX_VALUE, Long.MIN_VALUE};
        for (long time : times)
            all.add(single(7, time, utf8("key"), utf8("value"), NONE));
        for (int offset : new int[] {0, 63, 64, 8191, 8192, 1 << 20, (1 << 27) - 1, 1 << 27, Integer.MAX_VALUE})
            all.add(single(offset, -5, utf8("key"), null, NONE));
        for (int count : new int[] {1, 63, 64, 65})
            all.add(single(1, 1, null, utf8("v"), Collections.nCopies(count, new RecordHeader("h", utf8("x"))).toArray(NONE)));
        return all;
    }

    static String single(int offsetDelta, long timestampDelta, byte[] key, byte[] value, Header[] headers) throws Exception {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        DefaultRecord.writeTo(new DataOutputStream(bytes), offsetDelta, timestampDelta, wrapped(key), wrapped(value), headers);
        return String.format("{\"offset_delta\": %d, \"timestamp_delta\": %d, \"record\": %s,\n  \"bytes\": \"%s\"}", offsetDelta,
            timestampDelta, described(new SimpleRecord(timestampDelta, key, value, headers)), HexFormat.of().formatHex(bytes.toByteArray()));
    }

    // ---- hashes of keys

    static List<String> hashes() {
        List<byte[]> keys = new ArrayList<>();
        Random random = new Random(42);
        for (int size = 0; size <= 64; size++) {
            byte[] key = new byte[size];
            random.nextBytes(key);
            keys.add(key);
            keys.add(filled(size, 0xff));
        }
        for (String text : new String[] {"a", "21", "foobar", "a-little-bit-long-string", "a-little-bit-longer-string", "N12345", "größe",
            "ключ", "鍵", "🔑", "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8"})
            keys.add(utf8(text));
        for (int i = 0; i < 150; i++)
            keys.add(utf8("key-" + i * 7919));
        for (int size : new int[] {255, 256, 1023, 4099})
            keys.add(filled(size, size));
        return keys.stream().map(key -> {
            List<Integer> partitions = new ArrayList<>();
            for (int count : PARTITION_COUNTS)
                partitions.add(BuiltInPartitioner.partitionForKey(key, count));
            return String.format("{\"key\": \"%s\", \"murmur2\": %d, \"partitions\": %s}", HexFormat.of().formatHex(key),
                Utils.murmur2(key), partitions);
        }).collect(Collectors.toList());
    }

    // ---- helpers

    static SimpleRecord record(long timestamp, String key, String value) {
        return new SimpleRecord(timestamp, key == null ? null : utf8(key), value == null ? null : utf8(value));
    }

    static String described(SimpleRecord record) {
        List<String> headers = new ArrayList<>();
        for (Header header : record.headers())
            headers.add(String.format("[\"%s\", %s]", header.key(), quoted(wrapped(header.value()))));
        return String.format("{\"timestamp\": %d, \"key\": %s, \"value\": %s, \"headers\": [%s]}", record.timestamp(),
            quoted(record.key()), quoted(record.value()), String.join(", ", headers));
    }

    static String quoted(ByteBuffer bytes) {
        return bytes == null ? "null" : '"' + hex(bytes) + '"';
    }

    static String hex(ByteBuffer bytes) {
        return HexFormat.of().formatHex(Utils.toArray(bytes.duplicate()));
    }

    static ByteBuffer wrapped(byte[] bytes) {
        return bytes == null ? null : ByteBuffer.wrap(bytes);
    }

    static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static byte[] filled(int size, int with) {
        byte[] bytes = new byte[size];
        java.util.Arrays.fill(bytes, (byte) with);
        return bytes;
    }

    static void write(Path file, List<String> entries) throws Exception {
        Files.writeString(file, "[\n " + String.join(",\n ", entries) + "\n]\n");
    }
}
