import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.math.BigDecimal;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlyKeyValueStore;

/**
 * Both views in Kafka Streams' own idiom: the latest state is a KTable, the sums its groupBy with
 * adder and subtractor. Arguments: bootstrap servers, input topic, output topic, state folder,
 * guarantee, file with the right answer, changes of the first part, changes of both.
 */
public class Views {
    static final ObjectMapper JSON = new ObjectMapper();

    static Serde<JsonNode> tree() {
        return Serdes.serdeFrom(
            (topic, value) -> {
                try {
                    return value == null ? null : JSON.writeValueAsBytes(value);
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
            },
            (topic, bytes) -> {
                try {
                    return bytes == null ? null : JSON.readTree(bytes);
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
            });
    }

    /** Purchases, cents, and the sum of versions, which is how many changes are in. */
    static Serde<long[]> sums() {
        return Serdes.serdeFrom(
            (topic, v) -> v == null ? null
                : ByteBuffer.allocate(24).putLong(v[0]).putLong(v[1]).putLong(v[2]).array(),
            (topic, bytes) -> {
                if (bytes == null) return null;
                ByteBuffer in = ByteBuffer.wrap(bytes);
                return new long[] {in.getLong(), in.getLong(), in.getLong()};
            });
    }

    static JsonNode state(JsonNode change) {
        ObjectNode state = (ObjectNode) change.get("currentEntityState");
        return state.set("version", change.get("version"));
    }

    static KeyValue<String, long[]> worth(JsonNode state) {
        long cents = new BigDecimal(state.get("total").asText()).movePointRight(2).longValueExact();
        String group = state.get("country").asText() + "|" + state.get("status").asText();
        return KeyValue.pair(group, new long[] {1, cents, state.get("version").asLong()});
    }

    static long[] plus(long[] sum, long[] one, int sign) {
        return new long[] {
            sum[0] + sign * one[0], sum[1] + sign * one[1], sum[2] + sign * one[2]};
    }

    static KafkaStreams streams(String[] a) {
        Properties p = new Properties();
        p.put("application.id", a[2]);
        p.put("bootstrap.servers", a[0]);
        p.put("state.dir", a[3]);
        p.put("processing.guarantee", a[4]);
        p.put("commit.interval.ms", "100");
        p.put("num.stream.threads", "2");
        p.put("auto.offset.reset", "earliest");
        p.put("replication.factor", "1");
        p.put("producer.compression.type", "lz4");
        StreamsBuilder builder = new StreamsBuilder();
        KTable<String, JsonNode> latest = builder
            .stream(a[1], Consumed.with(Serdes.String(), tree()))
            .mapValues(Views::state)
            .toTable(Materialized.<String, JsonNode, KeyValueStore<Bytes, byte[]>>as("latest")
                .withKeySerde(Serdes.String()).withValueSerde(tree()));
        KTable<String, long[]> totals = latest
            .groupBy((key, state) -> worth(state), Grouped.with(Serdes.String(), sums()))
            .aggregate(() -> new long[3],
                (group, one, sum) -> plus(sum, one, 1),
                (group, one, sum) -> plus(sum, one, -1),
                Materialized.<String, long[], KeyValueStore<Bytes, byte[]>>as("totals")
                    .withKeySerde(Serdes.String()).withValueSerde(sums()));
        totals.toStream().to(a[2], Produced.with(Serdes.String(), sums()));
        return new KafkaStreams(builder.build(), p);
    }

    static long changesIn(ReadOnlyKeyValueStore<String, long[]> view) {
        long changes = 0;
        try (KeyValueIterator<String, long[]> rows = view.all()) {
            while (rows.hasNext()) changes += rows.next().value[2];
        }
        return changes;
    }

    static boolean isRight(ReadOnlyKeyValueStore<String, long[]> view, JsonNode answer) {
        int right = 0;
        try (KeyValueIterator<String, long[]> rows = view.all()) {
            while (rows.hasNext()) {
                KeyValue<String, long[]> row = rows.next();
                JsonNode wanted = answer.get(row.key);
                if (wanted == null) {
                    if (row.value[0] != 0 || row.value[1] != 0) return false;
                    continue;
                }
                if (row.value[0] != wanted.get(0).asLong()) return false;
                if (row.value[1] != wanted.get(1).asLong()) return false;
                right++;
            }
        }
        return right == answer.size();
    }

    public static void main(String[] a) throws Exception {
        long began = System.currentTimeMillis();
        JsonNode answer = JSON.readTree(Path.of(a[5]).toFile());
        long first = Long.parseLong(a[6]), both = Long.parseLong(a[7]);
        KafkaStreams streams = streams(a);
        streams.start();
        while (streams.state() != KafkaStreams.State.RUNNING) Thread.sleep(20);
        long ready = System.currentTimeMillis(), half = 0;
        ReadOnlyKeyValueStore<String, long[]> view = streams.store(
            StoreQueryParameters.fromNameAndType("totals", QueryableStoreTypes.keyValueStore()));
        while (true) {
            long changes = changesIn(view);
            if (half == 0 && changes >= first) half = System.currentTimeMillis();
            if (changes == both && isRight(view, answer)) break;
            Thread.sleep(100);
        }
        long right = System.currentTimeMillis();
        streams.close();
        System.out.printf("{\"start_s\": %.2f, \"first_s\": %.2f, \"existing_s\": %.2f}%n",
            (ready - began) / 1e3, (half - ready) / 1e3, (right - half) / 1e3);
        System.exit(0);
    }
}
